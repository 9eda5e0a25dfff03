"""The fuzzer: seeded mutations of valid files, and a loop that reports whatever is not one clear MinipsError or a right result.

`python -m tests.fuzz_support TARGET[,TARGET] SECONDS [FIRST_CASE]` runs in a process of its own; one JSON line a finding. A case is made
from its target and number alone, so FIRST_CASE repeats it. A hang ends the process with all stacks, a crash with its signal.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import pickle
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from minips.errors import MinipsError

CASE_SECONDS = 20  # of processor time, on a slow machine; cases take milliseconds
HANG_SECONDS = 40
CASE_MEMORY = 200 << 20  # more than this for files of a few kilobytes is a finding
ADDRESS_SPACE = 3 << 30  # on top of what the process has: one request for more fails at once
FORBIDDEN_EVENTS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "socket.connect")
DEEP = "@deep@"


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


ODD_VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 255, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400,
    0.0, -0.0, 0.5, 1e-300, 1e30, 1e308, float("nan"), float("inf"), float("-inf"), "", " ", "x", "null", "1", "a\nb\x1b[2J", "\ud800", "\0",
    "x" * 5000, "../outside", "../../../../etc/passwd", "/etc/passwd", "/dev/zero", "model.safetensors", "é\u2028\U0001f600", "<|im_end|>",
    [], [[]], {}, [None], [1, 2], [-1], [2**63], ["x"], [{}], {"x": 1}, {"": {}}, list(range(3000)), DEEP,
]  # fmt: skip
NUMBERS = [0, -1, 1, 7, 2**31, 2**62, 2**63, 2**64 - 1, 10**20]


@dataclass
class Target:
    """files: name -> the valid bytes that are mutated. attempt: use the folder; its result does not matter.

    pipes: a named pipe in a file's place must be refused too. A workflow may be one: --workflow <(command).
    """

    files: dict[str, bytes]
    attempt: Callable[[Path], object]
    pipes: bool = True


# Mutations


def mutated(rng: random.Random, name: str, data: bytes) -> bytes:
    """One to three mutations of a file's content, by its form or as bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        try:
            if name.endswith(".json") and rng.random() < 0.8:
                data = mutated_json(rng, data)
            elif name.endswith(".safetensors") and rng.random() < 0.7:
                data = mutated_safetensors(rng, data)
            elif name.endswith(".pt") and rng.random() < 0.6:
                data = mutated_zip(rng, data)
            else:
                data = mutated_bytes(rng, data)
        except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError, zipfile.BadZipFile, struct.error):
            data = mutated_bytes(rng, data)  # an earlier mutation left nothing to parse
    return data


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    content, size = bytearray(data), len(data)
    first = rng.randrange(size + 1)
    last = min(size, first + rng.choice((1, 2, 8, 100, 5000)))
    kind = rng.randrange(8)
    if kind == 0:
        for _ in range(rng.randint(1, 8)):
            if size:
                content[rng.randrange(size)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del content[first:]
    elif kind == 2:
        del content[first:last]
    elif kind == 3:
        content[first:first] = content[first:last] * rng.choice((1, 2, 50))
    elif kind == 4:
        content[first:last] = rng.randbytes(last - first)
    elif kind == 5:
        content[first:last] = rng.choice(
            (b"9" * 30, b"-1", b"NaN", b"Infinity", b"1e999", b"null", b"\0" * 8, b"\xff" * 8, b'"', b"{", b"]")
        )
    elif kind == 6:
        content[:0] = rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b" ", b"version https://git-lfs", rng.randbytes(8)))
    else:
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("archive/data.pkl", pickle.dumps(Bomb()))
        return rng.choice((b"", b"{}", b"[]", b"null", pickle.dumps(Bomb()), archive.getvalue(), b"[" * 100_000, b'{"a":' * 100_000))
    return bytes(content)


def pick(rng: random.Random, value: object) -> tuple[object, object]:
    """A (container, key) in a JSON value: a walk from the top that may stop anywhere, so that long lists do not draw everything."""
    while True:
        key = rng.choice(sorted(value)) if isinstance(value, dict) else rng.randrange(len(value))
        inner = value[key]
        if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.25:
            return value, key
        value = inner


def change_json(rng: random.Random, value: object) -> object:
    """A value tree with one or a few places changed, in place where it can be."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.02:
        return rng.choice(ODD_VALUES)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not value:
            break
        holder, key = pick(rng, value)
        old, kind = holder[key], rng.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice((key + "s", key.upper(), "x", "", key[:-1]))] = holder.pop(key)
        elif kind == 2:
            other, name = pick(rng, value)
            holder[key] = json.loads(dumped(other[name]))
        elif kind == 3 and isinstance(old, (int, float)):
            holder[key] = rng.choice(
                (old + 1, old - 1, -old, old * 2, old * 1000, old * 0.3 if abs(old) < 1e300 else 0.3, str(old)[:50], [old])
            )
        elif kind == 4 and isinstance(old, str):
            holder[key] = rng.choice((old + "x", old[:-1], old * 50, old.upper(), "../" + old, "/" + old, [old], old + "\n"))
        elif kind == 5 and isinstance(old, list) and old:
            holder[key] = rng.choice((old * 2, old[:-1], old[::-1], old[0], old + [rng.choice(ODD_VALUES)], dict.fromkeys(map(str, old))))
        else:
            holder[key] = json.loads(dumped(rng.choice(ODD_VALUES)))
    return value


def dumped(value: object) -> str:
    return json.dumps(value)


def mutated_json(rng: random.Random, data: bytes) -> bytes:
    text = dumped(change_json(rng, json.loads(data)))
    if rng.random() < 0.1 and (keys := [at for at in range(len(text)) if text.startswith('": ', at)]):  # the same key twice
        end = rng.choice(keys)
        start = text.rindex('"', 0, end)
        text = f"{text[:start]}{text[start : end + 1]}: {dumped(rng.choice(ODD_VALUES))}, {text[start:]}"
    depth = rng.choice((50, 900, 3000, 100_000))
    return text.replace(json.dumps(DEEP), "[" * depth + "]" * depth).encode()


def mutated_safetensors(rng: random.Random, data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    kind = rng.randrange(6)
    names = [name for name in header if name != "__metadata__"]
    entry = header[rng.choice(names)]
    if kind == 0:
        offsets = entry["data_offsets"]
        offsets[rng.randrange(2)] = rng.choice((*NUMBERS, *header[rng.choice(names)]["data_offsets"], len(body), len(body) + 1))
    elif kind == 1:
        entry["shape"] = rng.choice(
            ([], [2**32, 2**32], [2**63], [0], [0, 2**62], [-1], [1] * 1000, entry["shape"][::-1], [*entry["shape"], 1])
        )
    elif kind == 2:
        entry["dtype"] = rng.choice(("F64", "F32", "F16", "BF16", "I8", "U8", "I64", "F8_E4M3", "BOOL", "C64", "f32", "", None, 3))
    elif kind == 3 and body:
        for value in (float("nan"), float("inf"), 1e38)[: rng.randint(1, 3)]:
            at = rng.randrange(0, max(1, len(body) - 4))
            body[at : at + 4] = struct.pack("<f", value)
    elif kind == 4 and "data" in header.get("__metadata__", {}):
        meta = header["__metadata__"]
        meta["data"] = mutated_json(rng, meta["data"].encode()).decode("utf-8", "surrogatepass")
    else:
        header = change_json(rng, header)
    text = dumped(header).encode()
    size = len(text) if rng.random() < 0.9 else rng.choice((*NUMBERS, len(text) - 1, len(text) + 1)) % 2**64
    return size.to_bytes(8, "little") + text + bytes(body)


def mutated_zip(rng: random.Random, data: bytes) -> bytes:
    """The archive written anew with a record changed, compressed, far too long, or named outside."""
    source, target = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    records = {info.filename: source.read(info) for info in source.infolist()}
    name, kind = rng.choice(sorted(records)), rng.randrange(5)
    if kind == 0:
        records[name] = mutated_bytes(rng, records[name])
    elif kind == 1:
        records[next(name for name in records if name.endswith("data.pkl"))] = pickle.dumps(Bomb(), protocol=2)
    elif kind == 2:
        records["../" + name] = records.pop(name)
    elif kind == 3:
        return zip_bomb()
    method = zipfile.ZIP_DEFLATED if kind >= 3 else zipfile.ZIP_STORED
    with zipfile.ZipFile(target, "w", method, compresslevel=1) as file:
        for name, content in records.items():
            file.writestr(name, content)
    return target.getvalue()


@lru_cache
def zip_bomb() -> bytes:
    """A few hundred kilobytes that torch.load would make 256 MiB of."""
    target = io.BytesIO()
    torch.save({name: torch.zeros(16 << 20) for name in ("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias")}, target)
    packed = io.BytesIO()
    with zipfile.ZipFile(target) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for info in source.infolist():
            file.writestr(info.filename, source.read(info))
    return packed.getvalue()


def put(rng: random.Random, path: Path, data: bytes, pipes: bool) -> None:
    """Write the mutated file, or something that is no file in its place."""
    if rng.random() < 0.97 or not pipes:
        path.write_bytes(mutated(rng, path.name, data))
        return
    path.unlink()
    kind = rng.randrange(5)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind < 4:
        path.symlink_to(("/dev/zero", path.parent / "nowhere")[kind - 2])


# The loop


def run_case(target: Target, folder: Path, name: str, number: int) -> str | None:
    """One case -> what is wrong with how it went, or None. The folder is as before afterwards."""
    rng = random.Random(f"{name} {number}")
    file = rng.choice(sorted(target.files))
    path = folder / file
    put(rng, path, target.files[file], target.pipes)
    memory, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    found = None
    try:
        target.attempt(folder)
    except MinipsError as error:
        message = str(error)
        if "\n" in message or len(message) > 4000 or not message.strip():
            found = f"message of {len(message)} characters: {message[:300]!r}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        found = f"{type(error).__name__}: {str(error)[:300]}\n{traceback.format_exc()[-1500:]}"
    faulthandler.cancel_dump_traceback_later()
    took, grown = time.process_time() - started, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) << 10
    if took > CASE_SECONDS:
        found = found or f"took {took:.0f} s"
    if grown > CASE_MEMORY:
        found = found or f"took {grown >> 20} MiB"
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    path.write_bytes(target.files[file])
    return f"{file}: {found}" if found else None


def fuzz(name: str, make: Callable[[Path], Target], seconds: float, first: int = 0) -> tuple[int, list[dict]]:
    """Run cases of one target until the time is over, or until five findings -> cases run, findings."""
    place, before = Path(tempfile.mkdtemp(prefix="fuzz-")), Path.cwd()
    events: list[str] = []
    sys.addaudithook(lambda event, _: events.append(event) if event in FORBIDDEN_EVENTS else None)
    try:
        folder = place / "files"
        folder.mkdir()
        target = make(folder)
        for file, data in target.files.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(data)
        os.chdir(place)
        target.attempt(folder)  # the valid files must work
        used = next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
        resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE, resource.RLIM_INFINITY))
        end, number, findings = time.monotonic() + seconds, first, []
        events.clear()
        while time.monotonic() < end and len(findings) < 5:
            print(f"\r{name} {number}", end="", file=sys.stderr, flush=True)  # the last one is to blame for a crash
            found = run_case(target, folder, name, number)
            if events or (place / "exploded").exists():
                found = f"{found or ''} forbidden: {sorted(set(events)) or 'code ran'}"
                events.clear()
            if found:
                findings.append({"target": name, "case": number, "found": found})
            number += 1
        return number - first, findings
    finally:
        os.chdir(before)
        shutil.rmtree(place, ignore_errors=True)
