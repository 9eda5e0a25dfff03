"""Who computes on an engine: one thread at a time, signals held while something is half done, and running out of memory as one error."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps

from .errors import MinipsError


class Turns:
    """Whose turn it is on one engine. `with turns("decode"):` waits until no other thread computes; a turn within a turn goes on.

    In a turn the handlers of signals wait for its end or the next `safe_point`, so that Ctrl-C finds nothing half done. Refused in
    a forked process: the threads that compute did not come along, and a turn taken by one of them would never end.
    """

    def __init__(self):
        self._lock, self._process = threading.RLock(), os.getpid()
        self._owner: int | None = None
        self._waiting: set[int] = set()
        self._changing = False
        self._late: deque[Callable] = deque()

    @property
    def elsewhere(self) -> bool:
        """Whether this is another process than the engine's, or the end of one."""
        return os.getpid() != self._process or sys.is_finalizing()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        if os.getpid() != self._process:
            raise MinipsError(f"{what}: the engine was made in process {self._process} and cannot be used in a fork of it; load it here")
        thread = threading.get_ident()
        if self._owner != thread:
            if self._waiting:
                time.sleep(1e-4)  # or a thread that takes turn after turn would never let them in
            self._waiting.add(thread)
        try:
            with self._lock, HeldSignals():
                self._waiting.discard(thread)
                outer, self._owner = self._owner, thread
                try:
                    yield
                finally:
                    self._owner = outer
        finally:
            self._waiting.discard(thread)

    def guard(self, pool) -> None:
        """Have the pool's books changed in turn too: a handle may be closed, or forgotten and collected, by any thread at any time."""
        for name in ("allocate", "retain", "release", "drop"):
            setattr(pool, name, partial(self._change, getattr(type(pool), name), weakref.ref(pool)))

    def _change(self, change: Callable, place: weakref.ref, *arguments: object) -> list[int] | None:
        pool = place()
        if pool is None or self.elsewhere:  # nobody reads these books any more
            return []
        with self._lock, HeldSignals():
            if self._changing:  # a handle collected in the middle of a change gives its pages back after it
                self._late.append(partial(change, pool, *arguments))
                return None
            self._changing = True
            try:
                return change(pool, *arguments)
            finally:
                try:
                    while self._late:
                        self._late.popleft()()
                finally:
                    self._changing = False


def in_turn(method: Callable) -> Callable:
    """A method of an object that has `turns`, carried out in one turn."""

    @wraps(method)
    def call(self, *arguments: object, **named: object) -> object:
        with self.turns(method.__name__), memory_errors(method.__name__):
            return method(self, *arguments, **named)

    return call


class HeldSignals:
    """A block during which the Python handlers of Ctrl-C, SIGTERM and SIGALRM wait. Only the main thread ever runs handlers."""

    NUMBERS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name))

    def __init__(self):
        self.handlers: dict[int, Callable] = {}
        self.waiting: list[int] = []
        self.holding = True

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in self.NUMBERS:
                    handler = signal.getsignal(number)
                    if callable(handler) and _held_by(handler) is None:
                        self.handlers[number] = handler
                        signal.signal(number, self.note)
            except BaseException:  # by a handler that is not held yet
                self.restore()
                raise
        return self

    def note(self, number: int, frame: object) -> None:
        """Stands in for the handler."""
        if self.holding:
            self.waiting.append(number)
        else:
            self.handlers[number](number, frame)

    def deliver(self) -> None:
        """Run the handlers that wait."""
        while self.waiting:
            number = self.waiting.pop(0)
            self.handlers[number](number, None)

    def restore(self) -> None:
        """Put the handlers back where nobody has set others since."""
        try:
            for number, handler in self.handlers.items():
                if signal.getsignal(number) == self.note:
                    signal.signal(number, handler)
        finally:
            self.holding = False

    def __exit__(self, *_: object) -> None:
        self.restore()
        self.deliver()


def _held_by(handler: object) -> HeldSignals | None:
    holder = getattr(handler, "__self__", None)
    return holder if isinstance(holder, HeldSignals) and holder.holding else None


def safe_point() -> None:
    """Run the handlers of signals that came during this turn. Called where an exception leaves nothing half done."""
    if threading.current_thread() is threading.main_thread():
        for number in HeldSignals.NUMBERS:
            if (holder := _held_by(signal.getsignal(number))) is not None:
                holder.deliver()


class memory_errors:
    """A block in which running out of memory, on whatever device, becomes one MinipsError that holds on to no tensor.

    No `contextmanager`: its frames would keep the traceback, and with it what took the memory, as long as the error lives.
    """

    def __init__(self, what: str):
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        text = str(error)
        told = isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
        if told or isinstance(error, MemoryError):  # torch.OutOfMemoryError is a RuntimeError
            error.__traceback__ = None
            del traceback
            reason = f" ({text.splitlines()[0][:200]})" if text else ""
            raise MinipsError(
                f"{self.what}: out of memory{reason}; its pages are free again, and fewer or shorter branches may fit"
            ) from None
