"""Turn a GGUF file of the llama, qwen2 or qwen3 architecture into a folder of the Hugging Face layout (bf16 weights).

Tensors are dequantised and written one at a time, so memory stays flat whatever the size of the model.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from .config import ARCHITECTURES, ModelConfig
from .errors import MinipsError
from .weights import expected_shapes

Progress = Callable[[int, int], None]

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # GGUF token types
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>")
LLAMA3_ORIGINAL_CONTEXT, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0  # GGUF stores only the factors these give
_BLOCK = 1 << 22  # values dequantised at a time

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {"llama-bpe": _SPLIT % "{1,3}", "qwen2": _SPLIT % ""}
PRE_TOKENIZERS = ("smollm", *SPLITS)

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(path: str | Path, out_dir: str | Path, *, progress: Progress | None = None) -> Path:
    """Write the model of the GGUF file `path` to the new folder `out_dir` and return that folder.

    `progress(done, total)` is called after each tensor. The folder appears whole or not at all; where another process
    finishes the same folder first, its copy stands. MinipsError: `gguf` is not installed, the file is broken or of an
    architecture, tokenizer or RoPE scaling that is not supported, `out_dir` is not empty, the disk is full.
    """
    path, out_dir = Path(path), Path(out_dir)
    if out_dir.is_file() or out_dir.is_dir() and any(out_dir.iterdir()):
        raise MinipsError(f"{out_dir}: exists already, expected a new or empty folder")
    source = _Source(path)
    settings = _model_settings(source)
    tensors = _plan(source, ModelConfig.from_dict(settings, str(path)))
    tokenizer, token_settings, generation = _tokenizer_files(source)
    partial = out_dir.parent / f".{out_dir.name}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        partial.mkdir(parents=True)
        _write_safetensors(partial / "model.safetensors", source, tensors, progress)
        (partial / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        files = {"tokenizer_config.json": token_settings, "generation_config.json": generation, "config.json": settings}
        for name, data in files.items():
            (partial / name).write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        _publish(partial, out_dir)
    except OSError as error:
        raise MinipsError(f"{out_dir}: cannot write the converted model ({error.strerror or error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out_dir


def _publish(partial: Path, out_dir: Path) -> None:
    try:
        if out_dir.is_dir():
            out_dir.rmdir()
        os.rename(partial, out_dir)
    except OSError:
        if not (out_dir / "config.json").is_file():
            raise


class _Source:
    """A GGUF file: metadata by key and tensors by name. Every failure is a MinipsError naming the file."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise self.fail(f"cannot be read ({error.strerror or error})") from None
        if magic != b"GGUF":
            raise self.fail(f"is not a GGUF file: it begins with {magic!r}, expected b'GGUF'")
        try:
            import gguf
        except ImportError:
            raise MinipsError("reading a GGUF file needs the package gguf; install minips[demo]") from None
        self._gguf = gguf
        try:
            reader = gguf.GGUFReader(path)
            self.fields = reader.fields
            self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        except Exception as error:  # whatever the reader trips over: ValueError, IndexError, KeyError, UnicodeDecodeError ...
            raise self.fail(f"is broken or cut short ({_one_line(error)})") from None
        if reader.endianess != gguf.GGUFEndian.LITTLE:
            raise self.fail("is big-endian, expected little-endian")
        architecture = self.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise self.fail(f"architecture is {architecture!r}; supported: {', '.join(ARCHITECTURES)}")
        self.architecture: str = architecture

    def fail(self, message: str) -> MinipsError:
        return MinipsError(f"{self.path}: {message}")

    def get(self, key: str, default=None):
        """The metadata value of `key`; a missing key gives `default`."""
        field = self.fields.get(key)
        if field is None:
            return default
        try:
            return field.contents()
        except Exception as error:
            raise self.fail(f"metadata field {key} is not readable ({_one_line(error)})") from None

    def model(self, key: str, default=None):
        """The metadata value of <architecture>.`key`."""
        return self.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None):
        """The number in <architecture>.`key`; without a default it has to be there."""
        value = self.model(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            found = "is missing" if value is None else f"is {str(value)[:60]!r}, expected a number"
            raise self.fail(f"metadata field {self.architecture}.{key} {found}")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self.tensors[name].shape))  # GGUF counts dimensions from the inside

    def read(self, name: str, order: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Yield the tensor as fp32 arrays, in blocks of rows; `order` permutes the rows."""
        tensor, shape = self.tensors[name], self.shape(name)
        step = max(1, _BLOCK // math.prod(shape[1:])) if len(shape) > 1 else shape[0]
        for start in range(0, shape[0], step):
            rows = slice(start, start + step) if order is None else order[start : start + step]
            data = tensor.data if len(shape) == 1 and order is None else tensor.data[rows]
            try:
                yield np.asarray(self._gguf.quants.dequantize(data, tensor.tensor_type), dtype=np.float32)
            except (NotImplementedError, ValueError) as error:
                raise self.fail(f"tensor {name} of type {tensor.tensor_type.name} cannot be dequantised ({_one_line(error)})") from None


def _one_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _decimal(value: float) -> float:
    """The shortest decimal of an fp32 value: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


# Model settings and tensors


def _model_settings(source: _Source) -> dict:
    """The config.json of the model."""
    if source.get("split.count", 1) not in (0, 1):
        raise source.fail(f"is one of {source.get('split.count')} parts, expected a whole model; merge the parts first")
    for key in ("expert_count", "attention.sliding_window"):
        if source.model(key):
            raise source.fail(f"metadata field {source.architecture}.{key} is {source.model(key)!r}, which is not supported")
    heads, hidden = source.number("attention.head_count"), source.number("embedding_length")
    head_dim = source.number("attention.key_length", hidden // heads if heads > 0 else 0)
    for key in ("attention.value_length", "rope.dimension_count"):
        if source.model(key, head_dim) != head_dim:
            raise source.fail(f"metadata field {source.architecture}.{key} is {source.model(key)!r}, expected the head size {head_dim!r}")
    if "token_embd.weight" not in source.tensors:
        raise source.fail("tensor token_embd.weight is missing")
    settings = {
        "architectures": [ARCHITECTURES[source.architecture]],
        "model_type": source.architecture,
        "vocab_size": source.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": source.number("feed_forward_length"),
        "num_hidden_layers": source.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _decimal(source.number("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": source.number("context_length"),
        "rope_theta": _decimal(source.number("rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "attention_bias": source.architecture != "qwen2" and "blk.0.attn_q.bias" in source.tensors,
        "torch_dtype": "bfloat16",
    }
    settings["rope_scaling"] = _rope_scaling(source, settings["rope_theta"], head_dim)
    for name in ("bos", "eos"):
        token = source.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None:
            settings[f"{name}_token_id"] = token
    return settings


def _rope_scaling(source: _Source, theta: float, head_dim: int) -> dict | None:
    """The llama3 block that gives the file's frequency factors (rope_freqs.weight), or None without scaling."""
    kind, linear = source.model("rope.scaling.type", "none"), source.model("rope.scale_linear", 1.0)
    if kind != "none" or linear != 1.0:
        raise source.fail(f"rope scaling {kind if kind != 'none' else 'linear'!r} is not supported; supported: default, llama3")
    if "rope_freqs.weight" not in source.tensors:
        return None
    stored = np.concatenate(list(source.read("rope_freqs.weight"))).astype(np.float64)
    if np.all(stored == 1.0):
        return None
    factor = _decimal(stored.max())
    original = source.number("rope.scaling.original_context_length", LLAMA3_ORIGINAL_CONTEXT)
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise source.fail(
            f"rope_freqs.weight does not hold the llama3 factors of theta {theta:g}, factor {factor:g} and original context {original}"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": original,
    }


def _plan(source: _Source, config: ModelConfig) -> dict[str, tuple[str, np.ndarray | None]]:
    """Hugging Face name -> (GGUF name, order of its rows or None), checked to be exactly the model's tensors."""
    plan, unknown = {}, []
    for name in source.tensors:
        if re.fullmatch(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd", name):
            continue
        target = _hugging_face_name(name)
        order = None
        if config.model_type == "llama" and ".attn_q." in name:
            order = _row_order(config.num_attention_heads, config.head_dim)
        elif config.model_type == "llama" and ".attn_k." in name:
            order = _row_order(config.num_key_value_heads, config.head_dim)
        if target is None:
            unknown.append(name)
        else:
            plan[target] = (name, order)
    shapes = expected_shapes(config)
    unknown += [plan[name][0] for name in plan if name not in shapes]
    missing = [name for name in shapes if name not in plan]
    for problem, names in (("unknown", unknown), ("missing", missing)):
        if names:
            raise source.fail(f"{len(names)} {problem} tensor(s): {', '.join(names[:5])}")
    for name, shape in shapes.items():
        if source.shape(plan[name][0]) != shape:
            raise source.fail(f"tensor {plan[name][0]} has shape {list(source.shape(plan[name][0]))}, expected {list(shape)}")
    return {name: plan[name] for name in shapes}


def _hugging_face_name(name: str) -> str | None:
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _TOP_NAMES and parts[1] == "weight":
        return f"{_TOP_NAMES[parts[0]]}.weight"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES and parts[3] in ("weight", "bias"):
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{parts[3]}"
    return None


def _row_order(heads: int, head_dim: int) -> np.ndarray:
    """Rows of Q or K from neighbouring RoPE pairs (2i, 2i+1), as llama GGUF files have them, back to halves (i, i+d/2)."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _write_safetensors(path: Path, source: _Source, plan: dict[str, tuple[str, np.ndarray | None]], progress: Progress | None) -> None:
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (origin, _) in plan.items():
        shape = source.shape(origin)
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for done, (origin, order) in enumerate(plan.values(), 1):
            for block in source.read(origin, order):
                file.write(torch.from_numpy(np.require(block, requirements="CW")).bfloat16().view(torch.int16).numpy().data)
            if progress is not None:
                progress(done, len(plan))


# Tokenizer


def _tokenizer_files(source: _Source) -> tuple[tokenizers.Tokenizer, dict, dict]:
    """-> the tokenizer, tokenizer_config.json and generation_config.json."""
    model, pre = source.get("tokenizer.ggml.model"), source.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise source.fail(f"tokenizer.ggml.model is {model!r}; supported: gpt2 (byte-level BPE)")
    if pre not in PRE_TOKENIZERS:
        raise source.fail(f"tokenizer.ggml.pre is {pre!r}; supported: {', '.join(PRE_TOKENIZERS)}")
    tokens, merges = (source.get(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    kinds = source.get("tokenizer.ggml.token_type")
    size = source.shape("token_embd.weight")[0]
    counts = [len(item) if isinstance(item, list) else -1 for item in (tokens, kinds, merges)]
    if counts[:2] != [size, size] or counts[2] < 0:
        found = "tokenizer.ggml.tokens, token_type and merges hold {}, {} and {} items".format(*(max(n, 0) for n in counts))
        raise source.fail(f"{found}, expected {size} tokens with their types, and merges")
    ids = {}
    for name in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        token = source.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and (not isinstance(token, int) or not 0 <= token < size):
            raise source.fail(f"tokenizer.ggml.{name}_token_id is {token!r}, expected an id below {size}")
        ids[name] = token
    add_bos = bool(source.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")) and ids["bos"] is not None
    tokenizer = _build_tokenizer(source, pre, tokens, kinds, merges, tokens[ids["bos"]] if add_bos else None)
    named = {f"{key}_token": ids[name] for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.number("context_length"),
        **{key: tokens[token] for key, token in named.items() if token is not None},
    }
    template = source.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    known = [tokens.index(text) for text in END_TOKENS if text in tokens and kinds[tokens.index(text)] == CONTROL]
    ends = [token for token in dict.fromkeys((ids["eos"], ids["eot"], ids["eom"], *known)) if token is not None]
    generation = {key: ids[name] for key, name in (("bos_token_id", "bos"), ("pad_token_id", "padding")) if ids[name] is not None}
    if ends:
        generation["eos_token_id"] = ends
    return tokenizer, settings, generation


def _build_tokenizer(
    source: _Source, pre: str, tokens: list[str], kinds: list[int], merges: list[str], bos: str | None
) -> tokenizers.Tokenizer:
    added = [token for token, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)]
    plain = [token for token, kind in enumerate(kinds) if kind not in (CONTROL, USER_DEFINED, UNUSED)]
    # Added tokens right behind the plain ones get these very ids by themselves; elsewhere only the BPE vocabulary fixes their ids.
    behind = plain == list(range(len(plain))) and added == list(range(len(plain), len(plain) + len(added)))
    vocab = {tokens[token]: token for token in (plain if behind else sorted(plain + added))}
    try:
        pairs = [tuple(merge.split(" ")) for merge in merges]
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises plain Exception
        raise source.fail(f"tokenizer.ggml.merges do not fit the tokens ({_one_line(error)})") from None
    if pre == "smollm":
        split, use_regex = pre_tokenizers.Digits(individual_digits=True), True
    else:
        split, use_regex = pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated"), False
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for token in added:  # one at a time and in order, so that ids follow
        text = AddedToken(tokens[token], special=kinds[token] == CONTROL, normalized=False)
        (tokenizer.add_special_tokens if kinds[token] == CONTROL else tokenizer.add_tokens)([text])
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    wrong = [token for token in plain + added if tokenizer.token_to_id(tokens[token]) != token]
    if wrong:
        raise source.fail(f"tokenizer.ggml.tokens: {len(wrong)} token(s) cannot keep their id, first {tokens[wrong[0]]!r} ({wrong[0]})")
    return tokenizer
