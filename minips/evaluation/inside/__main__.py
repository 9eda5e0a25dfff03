"""The program inside the sandbox, started by `sandbox.py`.

Three processes. The *starter* enters new namespaces and waits. The *tester*, first process of the new process namespace, holds
the tests and gives the verdict. The *solver* holds the model's code and nothing else: it was forked before the tests were read.
Tests call the solution through pipes, and only plain values come back, so the code under test sees neither the tests nor the
channel of the verdict, and cannot pass by printing, exiting, or returning an object that equals everything. When the tester
ends, the kernel kills whatever is left in its process namespace; without one, all descendants are killed here.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import signal
import sys
import time
import types

from isolation import (
    LINUX,
    NOBODY,
    SET_DEATH_SIGNAL,
    SET_DUMPABLE,
    SET_NO_NEW_PRIVS,
    SET_SUBREAPER,
    WALL,
    close_files,
    drop_capabilities,
    drop_user,
    enter_spaces,
    kill_descendants,
    prctl,
    set_limits,
)
from values import Channel, Failed, decode, encode, told


class Overdue(BaseException):
    """The time is up. No `except Exception` of a test can swallow it."""


def solve(channel: Channel) -> None:
    """The solver: load the code, then answer calls until the tester says that it is over."""
    job = channel.receive()
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        exec(compile(job["source"], "solution.py", "exec"), module.__dict__)  # noqa: S102 - the purpose of this program
        loaded = {"names": [name for name, value in module.__dict__.items() if callable(value)]}
    except BaseException as error:  # noqa: BLE001 - whatever the code raises
        loaded = {"error": told(error)}
    channel.send(loaded)
    while call := channel.receive().get("call"):
        name, args, kwargs = call
        try:
            value = module.__dict__[name](*decode(args), **decode(kwargs))
            reply = {"value": encode(value)}
        except BaseException as error:  # noqa: BLE001 - whatever the code raises
            reply = {"error": told(error)}
        channel.send(reply)


def judge(job: dict, channel: Channel) -> None:
    """Run the tests on the solution; raises what went wrong."""
    channel.send({"source": job["source"]})
    loaded = channel.receive()
    if "error" in loaded:
        raise Failed(loaded["error"])

    def proxy(name: str):
        def call(*args, **kwargs):
            channel.send({"call": [name, encode(list(args)), encode(kwargs)]})
            reply = channel.receive()
            if "error" in reply:
                raise Failed(str(reply["error"]))
            return decode(reply["value"])

        return call

    def names_in(code: types.CodeType) -> set[str]:
        inner = [names_in(part) for part in code.co_consts if isinstance(part, types.CodeType)]
        return set(code.co_names).union(*inner)

    code = compile(job["tests"], "tests.py", "exec")
    entry, names = job["entry_point"], set(map(str, loaded["names"]))
    if entry and entry not in names:
        raise Failed(f"the code defines no {entry}")
    # A solution may hand out its own functions, but must not replace what the tests take for Python's.
    space = {name: proxy(name) for name in names_in(code) & names if not hasattr(builtins, name) or name == entry}
    space["__name__"] = "tests"
    exec(code, space)  # noqa: S102
    if getattr(space.get("check"), "__globals__", None) is space and not re.search(r"^check\(", job["tests"], re.MULTILINE):
        if not entry:
            raise Failed("the tests define check(candidate) and no entry point is named")
        space["check"](proxy(entry))


def test(folder: str, limits: dict, held: dict[str, bool], result: int) -> None:
    """The tester: finish the isolation, fork the solver, read the job, run the tests, write the verdict."""
    if held["files"]:
        held["files"] = close_files(folder, limits["file_size"] * 4)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    os.chdir(folder)
    held["user"] = drop_user()
    if LINUX:
        drop_capabilities()
    prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    prctl(SET_SUBREAPER, 1)
    prctl(SET_DUMPABLE, 0)  # the solver, of the same user, must not look into this process
    held["no_new_privileges"] = prctl(SET_NO_NEW_PRIVS, 1)
    to_solver, to_tester = os.pipe(), os.pipe()
    solver = os.fork()
    if solver == 0:
        try:
            os.setsid()
            prctl(SET_DUMPABLE, 1)
            prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(nothing, fd)
            read, write = os.dup(to_solver[0]), os.dup(to_tester[1])
            for fd in {*range(3, max(read, write) + 1), result} - {read, write}:
                try:
                    os.close(fd)
                except OSError:
                    pass
            channel = Channel(read, write)
            channel.send({"limits": set_limits(limits)})
            solve(channel)
        finally:
            os._exit(0)
    os.close(to_solver[0]), os.close(to_tester[1])
    gone: list[int] = []

    def alive() -> bool:
        if not gone and (status := os.waitpid(solver, os.WNOHANG))[0]:
            gone.append(os.waitstatus_to_exitcode(status[1]))
        return not gone

    def overdue(*_) -> None:
        raise Overdue

    channel = Channel(to_tester[0], to_solver[1], alive)
    passed, reason, started = False, "", time.monotonic()
    try:
        held["limits"] = bool(channel.receive()["limits"])
        job = json.loads(sys.stdin.buffer.read())
        set_limits({**limits, "cpu": WALL * limits["cpu"]})
        signal.signal(signal.SIGALRM, overdue)
        started = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, WALL * job["timeout"], 0.2)  # again and again, should a test swallow the first
        judge(job, channel)
        signal.setitimer(signal.ITIMER_REAL, 0)
        passed, reason = True, "passed"
    except Overdue:
        reason = f"no end after {WALL * job['timeout']:g} s by the clock"
    except AssertionError as error:
        reason = f"a test failed ({told(error)})"
    except BaseException as error:  # noqa: BLE001 - whatever the tests raise
        if "ended its process" in str(error):
            until = time.monotonic() + 0.5
            while alive() and time.monotonic() < until:
                time.sleep(0.01)
        how = f" (killed by signal {-gone[0]})" if gone and gone[0] < 0 else f" (exit status {gone[0]})" if gone else ""
        reason = (str(error) if isinstance(error, Failed) else told(error)) + how
        if gone and gone[0] == -signal.SIGXCPU:
            reason = f"no end after {limits['cpu']} s of processor time"
    signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.monotonic() - started
    if not held["processes"]:
        kill_descendants()
    verdict = {"passed": passed, "reason": reason, "seconds": seconds, "isolation": held}
    os.write(result, json.dumps(verdict).encode())


def main() -> None:
    """Arguments: the working folder, the limits as JSON, the caller's process id. Standard input: the job. Output: the verdict."""
    folder, limits, caller = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    sys.argv, sys.path[:1] = [""], []  # the solution must not import these files
    prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != caller:
        return  # it died before the signal was asked for
    prctl(SET_DUMPABLE, 0)
    result = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # prints of the tests must not get into the verdict
    held = enter_spaces()
    prctl(SET_DEATH_SIGNAL, signal.SIGKILL)  # a change of user clears it
    prctl(SET_DUMPABLE, 0)
    tester = os.fork()
    if tester == 0:
        try:
            test(folder, limits, held, result)
        except BaseException as error:  # noqa: BLE001 - the caller is told
            os.write(result, json.dumps({"broken": told(error)}).encode())
        finally:
            os._exit(0)
    os.close(result)
    os.waitpid(tester, 0)


if __name__ == "__main__":
    main()
