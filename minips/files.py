"""Writing files and folders whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from .errors import MinipsError


def write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_folder(folder: str | Path, fill: Callable[[Path], None]) -> Path:
    """Make `folder` whole or not at all: `fill` writes into a sibling, which is then renamed."""
    folder = Path(folder)
    try:
        if folder.exists() or folder.is_symlink():
            raise MinipsError(f"{folder}: exists already, expected a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name[:40]}.", dir=folder.parent))
        try:
            work.chmod(0o755)
            fill(work)
            for path in work.rglob("*"):
                path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors leaves files that only their owner can read
            os.rename(work, folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except MinipsError:
        raise
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:  # the latter of safetensors and torch.save, on a full disk
        raise MinipsError(f"{folder}: cannot be written ({getattr(error, 'strerror', None) or error})") from None
    return folder


def write_beside(path: Path, content: str | bytes) -> None:
    """Write a file under another name and rename it, so that a half-written one is never seen."""
    content = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    name = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name[:40]}.", delete=False) as file:
            name = file.name
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException as error:
        if name is not None and os.path.exists(name):
            os.unlink(name)
        if isinstance(error, OSError):
            raise MinipsError(f"{path}: cannot be written ({error.strerror or error})") from None
        raise
