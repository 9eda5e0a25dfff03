"""Runs code that a model wrote, and the tests that judge it, in processes that can do no harm.

    result = run_code("def f(x): return x + 1", tests="assert f(1) == 2", entry_point="f")
    result.passed, result.reason, result.isolation

The folder `inside` is the program that does it. What is promised on Linux as root or where unprivileged user namespaces are allowed:
the code runs as an unprivileged user, sees no network and no foreign process, finds every file system read-only but for a small
empty one in memory, cannot gain privileges, has limits on processor time, address space, files and processes, and nothing that
it started outlives the run. `RunResult.isolation` says which of these held; on other systems limits, a stripped environment, an
own session and a temporary folder remain. What is never promised: files that everybody may read can be read; memory is limited
per process, not in total; a bug of the kernel is not defended against; where no namespaces are given and the caller is not
root, the code is the caller's own user and could reach its files and processes. The verdict is safe as far as the processes are apart:
tests see plain values only, and the code never sees the tests.
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..errors import MinipsError
from .inside.isolation import WALL, descendants

_INSIDE = Path(__file__).with_name("inside")
_GRACE = 30.0  # seconds that interpreter and isolation may take beside the code's own time
_ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Limits:
    """Of each process: memory (address space) and file_size in bytes, open_files. Of the user: processes."""

    memory: int = 2 << 30
    file_size: int = 16 << 20
    open_files: int = 64
    processes: int = 32


@dataclass(frozen=True)
class RunResult:
    """passed: all tests ran and held. reason: "passed", or in words what went wrong. seconds: the code's and the tests' own time.

    isolation: name -> did it hold: user (unprivileged), network, processes (own process namespace, killed whole), files
    (read-only but for a folder in memory), memory_segments (own System V memory), limits, no_new_privileges.
    """

    passed: bool
    reason: str
    seconds: float
    isolation: dict[str, bool] = field(default_factory=dict)


def run_code(source: str, *, tests: str, entry_point: str | None = None, timeout: float = 10.0, limits: Limits = Limits()) -> RunResult:
    """Run `source`, then `tests` against its functions. Never raises for anything that the code does.

    tests: Python that raises where the code is wrong; it calls the code's functions by name. If it defines check(candidate),
    that is called with the function `entry_point`. Arguments and results travel as plain data (numbers, text, containers,
    numpy arrays); changes that the code makes to its arguments are not seen by the tests. Empty tests: the code must only run.
    entry_point: the function that the code must define. timeout: seconds of processor time of the code, rounded up; by the
    clock, code and tests together may take four times as long, so that a busy machine does not change a verdict.
    """
    if not (isinstance(timeout, (int, float)) and 0 < timeout < math.inf):
        raise MinipsError(f"timeout is {timeout!r}, expected a positive number of seconds")
    job = json.dumps({"source": source, "tests": tests, "entry_point": entry_point, "timeout": timeout}).encode()
    inside = {**asdict(limits), "cpu": math.ceil(timeout)}
    started, deadline = time.monotonic(), WALL * timeout + _GRACE
    with tempfile.TemporaryDirectory(prefix="minips-run-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", str(_INSIDE), folder, json.dumps(inside), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
        )
        try:
            answer, _ = process.communicate(job, deadline)
            reason = "the tests ended without a verdict"
        except subprocess.TimeoutExpired:
            answer, reason = b"", f"no verdict within {deadline:g} s"
        finally:
            _kill(process)
    try:
        verdict = json.loads(answer)
    except ValueError:
        return RunResult(False, reason, time.monotonic() - started)
    if "broken" in verdict:
        raise MinipsError(f"the sandbox could not be set up: {verdict['broken']}")
    return RunResult(**verdict)


def _kill(process: subprocess.Popen) -> None:
    """Kill what is left of a run: its session, and everything below it that left the session."""
    if process.poll() is None:
        for pid in descendants(process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            pass
    for pipe in (process.stdin, process.stdout):
        pipe.close()
    process.wait()


@functools.cache
def missing_isolation() -> tuple[str, ...]:
    """Names of the kinds of isolation that this system does not give, found out by one run; () if all hold."""
    return tuple(name for name, held in run_code("", tests="").isolation.items() if not held)
