"""How every command line runs and ends: an exit code, and one line on stderr where it did not end well."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from .errors import MinipsError, in_one_line


def command(argv: Sequence[str] | None, run: Callable[[], int], *, again: str = "") -> int:
    """Exit code 0 done, 1 refused or failed, 130 Ctrl-C; 2, bad usage, is argparse's. argv None: the process ends with this call.

    again: what the same command would do after Ctrl-C, told behind "interrupted".
    """
    try:
        return _told(run, again)
    except KeyboardInterrupt:  # before the run, or a second one while the first was being told
        return 130
    finally:
        if argv is None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C must not end in the interpreter's own traceback


def _told(run: Callable[[], int], again: str) -> int:
    if sys.stderr is None:  # closed by the caller: print would fall back to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character must not end the run
            stream.reconfigure(errors="backslashreplace")
    try:
        return run()
    except MinipsError as error:
        print(f"minips: error: {in_one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nminips: interrupted{'; ' * bool(again)}{again}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of stdout went away: nobody is left to tell
        _silence_stdout()
        return 1
    except OSError as error:
        _silence_stdout()
        where = f"{error.filename}:" if error.filename else "the output"
        print(in_one_line(f"minips: error: {where} cannot be written ({error.strerror or error})"), file=sys.stderr)
        return 1


def _silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not fail too."""
    if sys.stdout is not None and hasattr(sys.stdout, "fileno"):
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError:  # not a file: nothing is flushed there
            return


def require_matplotlib() -> None:
    """MinipsError where nothing can be drawn; asked before a run that ends in a plot, too."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MinipsError("plots need matplotlib, which is not installed; pip install matplotlib, or minips with its extra: plot") from None
