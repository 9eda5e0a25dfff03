"""Text to token ids and back: content with markers off, end ids, and incremental detokenization with stop strings.

Decoding works on the bytes of each token, so that a stream and a one-shot decode agree whatever the bytes are.
"""

from __future__ import annotations

import codecs
import json
import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from .config import ModelConfig
from .errors import MinipsError, brief, in_one_line
from .reading import is_integer, read_json, read_text

# Chat markers count as special even where a tokenizer.json forgets to say so: content must never become one.
MARKERS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def guarded(call: Callable, *arguments: object, failure: str = "tokenizer.json: cannot be used", **options: object) -> Any:
    """Call the tokenizers library; a hostile file makes it raise plain Exceptions, or panic, which `except Exception` would miss."""
    try:
        return call(*arguments, **options)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise MinipsError(f"{failure} ({in_one_line(error)[:300]})") from None


class Tokenizer:
    """A model's tokenizer.json.

    vocab_size: largest decodable id + 1. bos_token_id: what the model puts before raw text, else None.
    eos_token_ids: every id that ends a turn, those of generation_config.json first.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: ModelConfig, settings: dict | None = None, eos: Iterable[int] = ()):
        """`settings` is a parsed tokenizer_config.json; `eos` the end ids known from elsewhere, in order."""
        settings = settings or {}
        self.config, self._backend = config, backend
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # special tokens typed in a text are plain text
        special = {added.content for added in backend.get_added_tokens_decoder().values() if added.special}
        names = (_token_text(settings.get("bos_token")), _token_text(settings.get("eos_token")))
        forgotten = [t for t in dict.fromkeys((*MARKERS, *filter(None, names))) if t not in special and backend.token_to_id(t) is not None]
        backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in forgotten])
        self._special = {token: added.content for token, added in backend.get_added_tokens_decoder().items() if added.special}
        self._special_ids = {text: token for token, text in self._special.items()}
        vocab = backend.get_vocab(with_added_tokens=True)
        if not vocab:
            raise MinipsError("tokenizer.json: the vocabulary is empty")
        self.vocab_size = max(vocab.values()) + 1
        self._unknown = vocab.get(getattr(backend.model, "unk_token", None))
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
        kinds = [part.get("type") for part in (decoder or {}).get("decoders", [decoder or {}])]
        self._byte_level, self._byte_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self._anchor = guarded(backend.encode, "a", add_special_tokens=False).ids[-1:]
        self._pieces: dict[int, bytes] = {}
        self.bos_token_id = self._find_bos(settings, names[0])
        own_eos = self._special_ids.get(names[1])
        self.eos_token_ids = tuple(dict.fromkeys((*eos, *config.eos_token_ids, *(() if own_eos is None else (own_eos,)))))
        if not self.eos_token_ids:
            warnings.warn("the model names no end token: only max_tokens and stop strings end its output", stacklevel=3)

    @classmethod
    def from_folder(cls, folder: str | Path, config: ModelConfig) -> Tokenizer | None:
        """Load `folder`/tokenizer.json with tokenizer_config.json and generation_config.json where they are there.

        None where the folder has no tokenizer.json; MinipsError where one of the files is broken.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.exists():
            return None
        text = read_text(path)
        backend = guarded(tokenizers.Tokenizer.from_str, text, failure=f"{path}: not readable as a tokenizer")
        extra = {name: read_json(Path(folder) / name) if (Path(folder) / name).exists() else {} for name in _SIDE_FILES}
        generation, settings = (extra[name] for name in _SIDE_FILES)
        eos = generation.get("eos_token_id")
        eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
        if not all(is_integer(token) and token >= 0 for token in eos):
            found = generation["eos_token_id"]
            raise MinipsError(f"{Path(folder) / _SIDE_FILES[0]}: eos_token_id is {brief(found)}, expected a token id or a list of them")
        return cls(backend, config, settings, eos)

    def _find_bos(self, settings: dict, name: str | None) -> int | None:
        wanted = settings.get("add_bos_token")
        if wanted is False:
            return None
        plain, dressed = (guarded(self._backend.encode, "a", add_special_tokens=special).ids for special in (False, True))
        if len(dressed) > len(plain) and dressed[: len(plain)] != plain:
            return dressed[0]
        if wanted is True and name in self._special_ids:
            return self._special_ids[name]
        return self._special_ids.get("<|begin_of_text|>")  # Llama 3, also where its post-processor is missing

    def special_id(self, text: str) -> int | None:
        """Id of the special token (marker) written `text`, or None."""
        return self._special_ids.get(text)

    # Encoding

    def encode(self, text: str) -> list[int]:
        """Ids of content: no BOS, and special tokens written in the text stay plain text.

        Non-special added tokens (such as Qwen3's <think>) map to their ids. MinipsError for what is no valid Unicode text.
        """
        if not isinstance(text, str):
            raise MinipsError(f"text is {type(text).__name__}, expected a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            found = text[error.start]
            raise MinipsError(f"text has a lone surrogate {found!r} at character {error.start}, expected valid Unicode") from None
        ids = guarded(self._backend.encode, text, add_special_tokens=False).ids
        if not ids:
            return ids
        if (highest := max(ids)) >= self.config.vocab_size:
            raise MinipsError(f"text encodes to token id {highest}, the model's vocabulary ends at {self.config.vocab_size - 1}")
        for token in self._special.keys() & set(ids):
            if token != self._unknown:
                raise MinipsError(f"text encodes to the special token {self._special[token]!r}, which content must not contain")
        return ids

    def encode_raw(self, text: str) -> list[int]:
        """Ids of plain text at the root of a context: BOS once in front, where the model has one."""
        ids = self.encode(text)
        return ids if self.bos_token_id is None else [self.bos_token_id, *ids]

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        """Ids of text interleaved with marker ids; neighbouring texts are joined before they are encoded."""
        ids: list[int] = []
        text: list[str] = []
        for piece in pieces:
            if isinstance(piece, str):
                text.append(piece)
                continue
            ids += self.encode("".join(text))
            ids.append(piece)
            text.clear()
        return ids + self.encode("".join(text))

    # Decoding

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids. Bytes that are no UTF-8 become U+FFFD; ids beyond the vocabulary become nothing."""
        first, parts = True, []
        for token in ids:
            parts.append(self.token_bytes(int(token), skip_special, first))
            first = first and not self.token_bytes(int(token), skip_special)
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token: int, skip_special: bool = True, first: bool = False) -> bytes:
        """The bytes that a token adds to the text. `first`: it starts the text (some decoders strip a space there)."""
        if skip_special and token in self._special:
            return b""
        if first and not self._byte_level:
            return self._spell(token, True)
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._spell(token, False)
        return piece

    def _spell(self, token: int, first: bool) -> bytes:
        text = self._backend.id_to_token(token) if 0 <= token < self.vocab_size else None
        if text is None:
            return b""
        if self._byte_level:
            known = all(char in _BYTE_OF_CHAR for char in text)
            return bytes(map(_BYTE_OF_CHAR.__getitem__, text)) if known else text.encode("utf-8")
        byte = _BYTE_TOKEN.fullmatch(text) if self._byte_fallback else None
        if byte and int(byte[1], 16) >= 0x80:
            return bytes([int(byte[1], 16)])
        before = [] if first else self._anchor
        both, alone = (guarded(self._backend.decode, ids, skip_special_tokens=False) for ids in ([*before, token], before))
        return both[len(alone) :].encode("utf-8")


_SIDE_FILES = ("generation_config.json", "tokenizer_config.json")


def _token_text(value: object) -> str | None:
    """A token in tokenizer_config.json: a string, or an object with its content."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) and not _SURROGATE.search(value) else None  # half a pair: no token is written so


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE spells each byte as one printable character: itself, or the next free one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


class StreamDecoder:
    """Incremental detokenizer of one row: `push` each token, then `flush` once.

    The pieces concatenate to `tokenizer.decode(ids)`, cut before the first stop string. `stopped`: one has matched.
    `text`: what was given out so far. `kept_tokens`: tokens so far; after a stop, those wholly before the match.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._out: list[str] = []
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self._emitted = 0  # characters in _out
        self._started = False
        self._ends: list[int] = []  # per token: characters of the text up to its end, one it only begins included
        self.stopped = False
        self.kept_tokens = 0

    @property
    def text(self) -> str:
        return "".join(self._out)

    def push(self, token: int) -> str:
        """Take one token -> text that is final now: whole characters, and nothing that may yet belong to a stop string."""
        if self.stopped:
            return ""
        self._held += self._utf8.decode(self._tokenizer.token_bytes(int(token), first=not self._started))
        self._started = self._started or bool(self._tokenizer.token_bytes(int(token)))
        half = bool(self._utf8.getstate()[0])
        self._ends.append(self._emitted + len(self._held) + half)
        self.kept_tokens = len(self._ends)
        return self._release(self._reach())

    def flush(self) -> str:
        """The rest of the text at the end of the row: what was held back, a character cut in half as one U+FFFD."""
        if self.stopped:
            return ""
        self._held += self._utf8.decode(b"", final=True)
        return self._release(0)

    def _reach(self) -> int:
        """Length of the longest tail of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stop), default=0) - 1)
        for size in range(longest, 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._stop):
                return size
        return 0

    def _release(self, keep: int) -> str:
        starts = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if starts:
            self.stopped = True
            self.kept_tokens = bisect_right(self._ends, self._emitted + min(starts))
        cut = min(starts) if starts else len(self._held) - keep
        piece, self._held = self._held[:cut], "" if starts else self._held[cut:]
        self._emitted += len(piece)
        if piece:
            self._out.append(piece)
        return piece
