"""minips: answer from the KV caches of parallel workers of one language model (arXiv 2606.14672)."""

from .config import EngineConfig, MergeOptions, SamplingParams
from .engine import Engine
from .errors import MinipsError
from .synthesis import Synthesizer

__version__ = "0.1.0"
__all__ = ["Engine", "EngineConfig", "MergeOptions", "MinipsError", "SamplingParams", "Synthesizer"]
