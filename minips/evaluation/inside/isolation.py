"""Namespaces, users, limits: what keeps the code under test apart from the system. Plain system calls, Linux first."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
import time

WALL = 4  # times the processor time: what sleeping, waiting and a busy machine may take
NOBODY = 65534
NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
SPACES = {"processes": NEWPID, "network": NEWNET, "files": NEWNS, "memory_segments": NEWIPC}
SET_DEATH_SIGNAL, SET_DUMPABLE, SET_SUBREAPER, SET_NO_NEW_PRIVS = 1, 4, 36, 38
LINUX = sys.platform == "linux"
libc = ctypes.CDLL(None, use_errno=True) if LINUX else None


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
    if not mount("proc", "/proc", "proc", no_devices_no_suid):
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
            most = value + 1 if name == "RLIMIT_CPU" else value  # past the first a signal that can be named, then the end
            value, most = (n if hard == resource.RLIM_INFINITY else min(n, hard) for n in (value, most))
            resource.setrlimit(getattr(resource, name), (value, most))
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
