"""torch.compile for functions that are called often: without guards, with kernels that outlast the process, and errors in one line.

Guards (checks that a call is like the one that was compiled) cost more than fused small operations save. So the caller keeps one form
for each kind of call, by a key of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType

import torch
from torch import Tensor

from .errors import MinipsError
from .hub import cache_folder


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


say: Callable[[str], None] = _print  # hears what is being compiled


@contextmanager
def heard_by(listener: Callable[[str], None]) -> Iterator[None]:
    """Within, `listener` hears it."""
    global say
    before, say = say, listener
    try:
        yield
    finally:
        say = before


def require_compiler() -> None:
    """MinipsError where there is no C++ compiler, which kernels of a CPU need."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise MinipsError(f"compile: on a CPU it needs a C++ compiler, and {compiler} was not found; install it, or name another in CXX")


def new_form(function: FunctionType, what: str, dynamic: bool, varying: Callable[..., Iterable[Tensor]] | None = None) -> Callable:
    """A compiled form of `function`, for calls of one kind. Its first call compiles, which takes a while: a line on stderr says so of `what`.

    dynamic: whether sizes may differ between calls. varying: of the arguments of a call those whose first size may differ where no other
    does; it is the same size for all of them, and more than 1.
    """
    code = function.__code__.replace(co_name="compiled" + function.__name__)  # Dynamo keeps what it compiles with a function's code
    form = FunctionType(code, function.__globals__, code.co_name)
    form = torch.compile(form, fullgraph=True, dynamic=dynamic, options={"guard_filter_fn": _none})
    done = False

    def call(*arguments: object) -> object:
        nonlocal done
        if done:
            return form(*arguments)
        from torch.fx.experimental import _config as sizes

        for tensor in varying(*arguments) if varying is not None else ():
            torch._dynamo.mark_dynamic(tensor, 0)
        say(f"compiling {what} ...")
        started = time.perf_counter()
        try:
            one_size = varying is not None  # else rows and KV heads that are equal at first need not stay so
            with _lasting_cache(), sizes.patch(use_duck_shape=one_size), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what Dynamo looks through: nothing that a user could change
                result = form(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = " ".join(str(error).split("Set TORCHDYNAMO_VERBOSE")[0].split())
            raise MinipsError(f"compile: {reason[:300]}") from None
        say(f"compiled in {time.perf_counter() - started:.1f} s")
        done = True
        return result

    return call


def _none(guards: Sequence[object]) -> list[bool]:
    return [False] * len(guards)


@contextmanager
def _lasting_cache() -> Iterator[None]:
    """Kernels are kept in minips' cache folder, unless a folder was named: torch's own choice is gone after a restart."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # loads Inductor, which nothing else needs

    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    if before is None or before == default_cache_dir():
        os.environ[name] = str(cache_folder() / "compiled")
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
