"""Toy tokenizers for the tests: byte-level BPE in which token i < 256 is byte i, and tables of arbitrary byte pieces."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from minips.config import ModelConfig
from minips.tokenizer import Tokenizer

MERGES = ["u s", "us e", "use r", "Ċ Ċ", "Ġ a", "h i", "s y", "sy s"]  # ids 256 to 263
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # 264 to 266
LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]  # 264 to 269


def tiny_config(vocab_size: int = 300, eos_token_id: int | list | None = None) -> ModelConfig:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), 2)
    return ModelConfig.from_dict({"model_type": "llama", "vocab_size": vocab_size, "eos_token_id": eos_token_id, "head_dim": 2, **sizes})


CONFIG = tiny_config()


def spell(data: bytes) -> str:
    """Bytes in the alphabet of byte-level BPE."""
    visible = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    hidden = [b for b in range(256) if b not in visible]
    return "".join(chr(b) if b in visible else chr(256 + hidden.index(b)) for b in data)


def toy_backend(specials: list[str], bos: bool = False, plain_added: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    pairs = [tuple(merge.split()) for merge in MERGES]
    vocab = {spell(bytes([b])): b for b in range(256)} | {"".join(pair): 256 + i for i, pair in enumerate(pairs)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(specials)
    backend.add_tokens(list(plain_added))
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{specials[0]} $A", special_tokens=[(specials[0], backend.token_to_id(specials[0]))]
        )
    return backend


def toy_folder(folder: Path, backend: tokenizers.Tokenizer, **files: dict) -> Path:
    """Write tokenizer.json, and each keyword as <keyword>.json."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return folder


def toy_tokenizer(kind: str = "chatml") -> Tokenizer:
    backend = toy_backend(CHATML) if kind == "chatml" else toy_backend(LLAMA3, bos=True)
    return Tokenizer(backend, CONFIG, eos=[backend.token_to_id("<|im_end|>" if kind == "chatml" else "<|eot_id|>")])


def piece_tokenizer(pieces: list[bytes], specials: tuple[str, ...] = ()) -> Tokenizer:
    """Token i is pieces[i], whatever bytes it holds."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={spell(piece): i for i, piece in enumerate(pieces)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    return Tokenizer(backend, CONFIG, eos=[0])
