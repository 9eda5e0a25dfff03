"""minips: answer from the KV caches of parallel workers of one language model (arXiv 2606.14672)."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import EngineConfig, MergeOptions, SamplingParams
    from .engine import Engine
    from .errors import MinipsError
    from .synthesis import Synthesizer

__version__ = "0.1.0"
__all__ = ["Engine", "EngineConfig", "MergeOptions", "MinipsError", "SamplingParams", "Synthesizer"]

_HOME = {
    "Engine": "engine", "EngineConfig": "config", "MergeOptions": "config", "MinipsError": "errors", "SamplingParams": "config",
    "Synthesizer": "synthesis",
}  # fmt: skip


def __getattr__(name: str) -> object:
    """Import on first use, so that the command line answers --help and Ctrl-C before torch is loaded."""
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
