"""The `weights` folders, and the adapter that comes with a model. Needs no torch."""

from __future__ import annotations

import site
import sysconfig
from pathlib import Path

from .config import DEFAULT_MODEL

DEFAULT_ADAPTER = "smollm2-135m-ps"  # trained for the default model, and used with it unless another or none is named


def weights_folders() -> list[Path]:
    """The folders that names of models and adapters are looked up in: `weights` beside the package, where pip puts it, in the current folder."""
    beside = Path(__file__).resolve().parent.parent
    installed = (Path(sysconfig.get_path("data")), Path(site.getuserbase()), beside)  # plain, --user, --target
    folders = (beside / "weights", *(place / "share" / "minips" / "weights" for place in installed), Path.cwd() / "weights")
    return list(dict.fromkeys(folders))


def shipped_adapter(model: str) -> str | None:
    """The name of the adapter that goes with a model of this name, where it is there; else None."""
    there = any((folder / DEFAULT_ADAPTER / "minips.json").is_file() for folder in weights_folders())
    return DEFAULT_ADAPTER if model == DEFAULT_MODEL and there else None
