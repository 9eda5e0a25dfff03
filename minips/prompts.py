"""From prompts (text, messages, token ids) to ids, in the model's chat format or raw. CONTRACT.md section 1."""

from __future__ import annotations

from pathlib import Path

from .chat import ChatFormat, require_format
from .config import ModelConfig
from .errors import MinipsError
from .kv_cache import Branch
from .reading import is_integer
from .tokenizer import Tokenizer

Prompt = str | list


class Prompts:
    """Encodes prompts for one model; without a tokenizer only token ids are possible."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None, chat: ChatFormat | None, folder: Path | None):
        self.config, self.tokenizer, self.chat, self.folder = config, tokenizer, chat, folder

    def encode(self, prompt: Prompt, kind: str, *, raw: bool = False, **chat_arguments: object) -> list[int]:
        """Ids of a prompt. kind: full, prefix, branch or continuation, the pieces of `ChatFormat`."""
        if isinstance(prompt, (list, tuple)) and all(map(is_integer, prompt)):
            if chat_arguments.get("system") is not None:
                raise MinipsError("a system text cannot be combined with token ids; put it into them")
            for token in prompt:
                if not 0 <= token < self.config.vocab_size:
                    raise MinipsError(f"token id {token} is outside the model's vocabulary of {self.config.vocab_size}")
            return list(prompt)
        if not isinstance(prompt, (str, list, tuple)):
            raise MinipsError(f"prompt is {type(prompt).__name__}, expected a string, a list of messages or a list of token ids")
        if self.tokenizer is None:
            raise MinipsError(f"{self.folder}: no tokenizer.json, so prompts must be lists of token ids")
        if raw:
            if not isinstance(prompt, str):
                raise MinipsError("raw prompts are strings; messages need the model's chat format")
            if chat_arguments.get("system"):
                raise MinipsError("raw=True cannot be combined with a system text; put it into the prompt")
            return self.tokenizer.encode_raw(prompt) if kind in ("full", "prefix") else self.tokenizer.encode(prompt)
        piece = getattr(require_format(self.chat), kind)
        return piece(prompt, **chat_arguments)

    def fork(self, prefix: Branch, prompt: Prompt) -> list[int]:
        """Ids of c_br: the rest of an open user turn, a turn of its own, or, behind a worker's output, the next turn."""
        if prefix.turn == "assistant":
            return [] if prompt == "" else self.encode(prompt, "continuation", raw=prefix.raw)
        state = {"open_turn": prefix.turn.startswith("open"), "empty_prefix": prefix.turn == "open_empty"}
        return self.encode(prompt, "branch", raw=prefix.raw, **state)

    def output(self, output: str | list[int]) -> list[int]:
        """Ids of plain text that follows in the same turn (no BOS, markers off), or ids as they are."""
        if isinstance(output, str) and self.tokenizer is not None:
            return self.tokenizer.encode(output)
        return self.encode(output, "branch", raw=True)
