"""The inside of the sandbox: a program of its own, started by `sandbox.py` as `python -I sandbox_child.py`.

Three processes. The *starter* enters new namespaces and waits. The *tester*, first process of the new process namespace, holds
the tests and gives the verdict. The *solver* holds the model's code and nothing else: it was forked before the tests were read.
Tests call the solution through pipes, and only plain values come back, so the code under test sees neither the tests nor the
channel of the verdict, and cannot pass by printing, exiting, or returning an object that equals everything. When the tester
ends, the kernel kills whatever is left in its process namespace; without one, all descendants are killed here.
"""

from __future__ import annotations

import builtins
import ctypes
import itertools
import json
import os
import re
import resource
import select
import signal
import struct
import sys
import time
import types

NOBODY = 65534
MOST_BYTES = 32 << 20  # of one value between solver and tester
NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
SPACES = {"processes": NEWPID, "network": NEWNET, "files": NEWNS, "memory_segments": NEWIPC}
SET_DEATH_SIGNAL, SET_DUMPABLE, SET_SUBREAPER, SET_NO_NEW_PRIVS = 1, 4, 36, 38
LINUX = sys.platform == "linux"
libc = ctypes.CDLL(None, use_errno=True) if LINUX else None


class Overdue(BaseException):
    """The time is up. No `except Exception` of a test can swallow it."""


class Failed(Exception):
    """The solution could not be run or gave no value."""


# ---- isolation


def prctl(option: int, value: int) -> bool:
    return LINUX and libc.prctl(option, value, 0, 0, 0) == 0


def drop_user() -> bool:
    """From root to nobody, without other groups; refused where nobody could not read Python's library."""
    if os.geteuid() != 0:
        return True
    os.setegid(NOBODY), os.seteuid(NOBODY)
    readable = os.access(os.__file__, os.R_OK, effective_ids=os.access in os.supports_effective_ids)
    os.seteuid(0), os.setegid(0)
    if not readable:
        return False
    os.setgroups([])
    os.setgid(NOBODY), os.setuid(NOBODY)
    return os.geteuid() == NOBODY


def drop_capabilities() -> None:
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capset(header, none)


def enter_spaces() -> dict[str, bool]:
    """New namespaces, as far as the system gives them: directly as root, else in a user namespace of the unprivileged user."""
    if not LINUX:
        return dict.fromkeys(SPACES, False)
    if os.geteuid() == 0 and libc.unshare(NEWNS | NEWPID | NEWNET | NEWIPC) == 0:
        return dict.fromkeys(SPACES, True)
    drop_user()
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(NEWUSER) != 0:
        return dict.fromkeys(SPACES, False)
    prctl(SET_DUMPABLE, 1)  # else the maps cannot be written
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError:
            pass  # then the user has no name in there, which does no harm
    return {name: libc.unshare(flag) == 0 for name, flag in SPACES.items()}


def mount(source: str | None, at: str, kind: str | None = None, flags: int = 0, options: str = "") -> bool:
    words = [word.encode() if word is not None else None for word in (source, at, kind, options)]
    return libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]) == 0


def uncover_library() -> None:
    """Where Python lives in a folder closed to others (the home of root), show nobody that folder with Python in it and nothing else."""
    for prefix in {os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix)}:
        above = prefix.split("/")
        folders = ["/".join(above[:n]) for n in range(2, len(above) + 1)]
        closed = next((folder for folder in folders if not os.stat(folder).st_mode & 0o001), prefix)
        if closed != prefix:
            library = os.open(prefix, os.O_RDONLY)
            if mount("tmpfs", closed, "tmpfs", options="mode=755,size=1m"):
                os.makedirs(prefix)
                mount(f"/proc/self/fd/{library}", prefix, flags=0x5000)  # the same folder, seen there again
            os.close(library)


def close_files(folder: str, size: int) -> bool:
    """Every mounted file system read-only, but for a small one in memory over the working folder; only own processes in /proc."""
    private, no_devices_no_suid, read_only = 0x44000, 0x6, 0x1
    if not mount(None, "/", flags=private):
        return False
    if os.geteuid() == 0:
        uncover_library()
        os.makedirs(folder, exist_ok=True)
    attributes = struct.pack("QQQQ", 0x3, 0, 0, 0)  # read-only, no set-user-id
    held = libc.syscall(ctypes.c_long(442), ctypes.c_int(-100), b"/", ctypes.c_uint(0x8000), attributes, ctypes.c_size_t(32)) == 0
    held = held and mount("tmpfs", folder, "tmpfs", no_devices_no_suid, f"size={size},nr_inodes=4096,mode=1777")
    if held and not mount("proc", "/proc", "proc", no_devices_no_suid):
        mount("tmpfs", "/proc", "tmpfs", no_devices_no_suid | read_only)  # other processes must not be seen
    return held


def set_limits(limits: dict) -> bool:
    """Hard limits of this process and those it starts; True if all held."""
    wanted = {
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": limits["cpu"],
        "RLIMIT_AS": limits["memory"],
        "RLIMIT_FSIZE": limits["file_size"],
        "RLIMIT_NOFILE": limits["open_files"],
        "RLIMIT_NPROC": limits["processes"],
    }
    held = True
    for name, value in wanted.items():
        try:
            hard = resource.getrlimit(getattr(resource, name))[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(getattr(resource, name), (value, value))
        except (ValueError, OSError, AttributeError):
            held = False
    return held


def descendants(root: int) -> list[int]:
    """Process ids below `root`, from /proc; none where there is no /proc."""
    below: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if LINUX and os.path.isdir("/proc") else ():
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                below.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
        except (OSError, ValueError, IndexError):
            continue
    found, at = [root], 0
    while at < len(found):
        found += below.get(found[at], [])
        at += 1
    return found[1:]


def kill_descendants() -> None:
    """Kill and reap everything that this process, their subreaper, has below it, until nothing is left or two seconds are over."""
    until = time.monotonic() + 2
    while (alive := descendants(os.getpid())) and time.monotonic() < until:
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except OSError:
            pass


# ---- values between solver and tester


def encode(value: object, depth: int = 0) -> object:
    """A value as JSON: plain types with their contents, anything else as its name only. Subclasses become their plain type."""
    if depth > 200:
        raise Failed("a value is nested more than 200 deep")
    if value is None or isinstance(value, (bool, float, str)):
        return value if value is None or isinstance(value, bool) else float(value) if isinstance(value, float) else str(value)
    if isinstance(value, int):
        return int(value) if -(1 << 63) < value < 1 << 63 else {"t": "int", "v": hex(value)}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        plain = encode(value.tolist(), depth + 1)
        return {"t": "array", "v": plain} if getattr(value, "shape", ()) else plain
    if isinstance(value, list):
        return [encode(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {"t": "dict", "v": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"t": "bytes", "v": value.hex()}
    if isinstance(value, complex):
        return {"t": "complex", "v": [value.real, value.imag]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {"t": kind.__name__, "v": [encode(item, depth + 1) for item in value]}
    if hasattr(value, "__next__"):
        return {"t": "iterator", "v": [encode(item, depth + 1) for item in itertools.islice(value, 1_000_000)]}
    return {"t": "object", "v": type(value).__name__}


class Opaque:
    """Stands for a value of the solution that is no plain data; equal only to itself."""

    def __init__(self, kind: str):
        self.kind = kind

    def __repr__(self) -> str:
        return f"<a {self.kind} of the solution>"


def decode(value: object) -> object:
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = value["t"], value["v"]
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "dict":
        return {decode(k): decode(v) for k, v in content}
    if kind == "object":
        return Opaque(str(content)[:80])
    items = [decode(item) for item in content]
    if kind == "array":
        import numpy

        return numpy.array(items)
    return {"tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter}[kind](items)


class Channel:
    """Messages (JSON, length in front) between two processes; `alive` says whether the other one still runs."""

    def __init__(self, read: int, write: int, alive=lambda: True):
        self.read, self.write, self.alive = read, write, alive

    def send(self, message: dict) -> None:
        data = json.dumps(message).encode()
        data = struct.pack("!Q", len(data)) + data
        try:
            while data:
                data = data[os.write(self.write, data) :]
        except BrokenPipeError:
            raise Failed("the code ended its process") from None

    def _take(self, count: int) -> bytes:
        parts = []
        while count:
            # A grandchild may hold the pipe open when the solver is gone, so the end of file alone is no proof of life.
            if not select.select([self.read], [], [], 0.2)[0] and self.alive():
                continue
            part = os.read(self.read, min(count, 1 << 20)) if select.select([self.read], [], [], 0)[0] else b""
            if not part:
                raise Failed("the code ended its process")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def receive(self) -> dict:
        size = struct.unpack("!Q", self._take(8))[0]
        if size > MOST_BYTES:
            raise Failed(f"a value takes {size} bytes, at most {MOST_BYTES} are read")
        message = json.loads(self._take(size))
        if not isinstance(message, dict):
            raise Failed("the code wrote into the channel of its values")
        return message


def told(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # a hostile exception
        text = ""
    return f"{type(error).__name__}: {text}"[:300].rstrip(": ")


# ---- the three processes


def solve(channel: Channel) -> None:
    """The solver: load the code, then answer calls until the tester says that it is over."""
    job = channel.receive()
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        exec(compile(job["source"], "solution.py", "exec"), module.__dict__)
        loaded = {"names": [name for name, value in module.__dict__.items() if callable(value)]}
    except BaseException as error:
        loaded = {"error": told(error)}
    channel.send(loaded)
    while call := channel.receive().get("call"):
        name, args, kwargs = call
        try:
            value = module.__dict__[name](*decode(args), **decode(kwargs))
            reply = {"value": encode(value)}
        except BaseException as error:
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
    exec(code, space)
    if isinstance(space.get("check"), types.FunctionType) and not re.search(r"^check\(", job["tests"], re.MULTILINE):
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
        set_limits(limits)
        signal.signal(signal.SIGALRM, overdue)
        started = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, job["timeout"], 0.2)  # again and again, should a test swallow the first
        judge(job, channel)
        signal.setitimer(signal.ITIMER_REAL, 0)
        passed, reason = True, "passed"
    except Overdue:
        reason = f"no end after {job['timeout']:g} s"
    except AssertionError as error:
        reason = f"a test failed ({told(error)})"
    except BaseException as error:
        if "ended its process" in str(error):
            until = time.monotonic() + 0.5
            while alive() and time.monotonic() < until:
                time.sleep(0.01)
        how = f" (killed by signal {-gone[0]})" if gone and gone[0] < 0 else f" (exit status {gone[0]})" if gone else ""
        reason = (str(error) if isinstance(error, Failed) else told(error)) + how
    signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.monotonic() - started
    if not held["processes"]:
        kill_descendants()
    verdict = {"passed": passed, "reason": reason, "seconds": seconds, "isolation": held}
    os.write(result, json.dumps(verdict).encode())


def main() -> None:
    """Arguments: the working folder and the limits as JSON. Standard input: the job. Standard output: the verdict."""
    folder, limits = sys.argv[1], json.loads(sys.argv[2])
    sys.argv = [""]
    prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
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
        except BaseException as error:
            os.write(result, json.dumps({"broken": told(error)}).encode())
        finally:
            os._exit(0)
    os.close(result)
    os.waitpid(tester, 0)


if __name__ == "__main__":
    main()
