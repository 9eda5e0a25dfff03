"""GGUF conversion on tiny files written here: tensors, settings, tokenizers, refusals."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from minips.config import ModelConfig
from minips.convert import main
from minips.errors import MinipsError
from minips.gguf_convert import convert_gguf
from minips.tokenizer import Tokenizer
from minips.weights import expected_shapes, load_weights

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS, DIM, HIDDEN, INNER, LAYERS = 4, 2, 16, 64, 96, 2
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("1", "2"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t")]
PLAIN = [*ALPHABET, *("".join(pair) for pair in MERGES)]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def hf_name_to_gguf(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
        **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    }
    for old, new in parts.items():
        name = name.replace(old, new)
    return name


def published_permutation(rows: np.ndarray, heads: int) -> np.ndarray:
    """What the public converters do to the Q and K of a llama checkpoint."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def make(path, arch="llama", pre="smollm", *, tied=True, kind="F32", plain=PLAIN, front=False, user=(), edit=None, extra=None, drop=()):
    """Write a tiny GGUF and return (config, original tensors). `front` puts the control tokens before the plain ones."""
    specials = [*CONTROL, *user]
    tokens = [*specials, *plain] if front else [*plain, *specials]
    types = {**dict.fromkeys(CONTROL, 3), **dict.fromkeys(user, 4)}
    config = ModelConfig.from_dict(
        {
            "model_type": arch,
            "vocab_size": len(tokens),
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "tie_word_embeddings": tied,
        }
    )
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in expected_shapes(config).items()}
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    if DIM * HEADS != HIDDEN or arch == "qwen3":
        writer.add_key_length(DIM)
        writer.add_value_length(DIM)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([types.get(token, 5 if token.startswith("[PAD") else 1) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template("{{ messages }}")
    if edit is not None:
        edit(writer)
    for name, tensor in tensors.items():
        rows = tensor.float().numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            rows = published_permutation(rows, HEADS if "q_proj" in name else KV_HEADS)
        if hf_name_to_gguf(name) in drop:
            continue
        if kind != "F32" and rows.ndim == 2:
            qtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(hf_name_to_gguf(name), gguf.quants.quantize(rows, qtype), raw_dtype=qtype)
        else:
            writer.add_tensor(hf_name_to_gguf(name), rows)
    for name, rows in (extra or {}).items():
        writer.add_tensor(name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, tensors


@pytest.mark.parametrize(
    "arch, pre, tied", [("llama", "smollm", True), ("llama", "llama-bpe", False), ("qwen2", "qwen2", True), ("qwen3", "qwen2", False)]
)
@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_tensors_and_settings_survive(tmp_path, arch, pre, tied, kind):
    _, original = make(tmp_path / "m.gguf", arch, pre, tied=tied, kind=kind)
    steps = []
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path / "out", progress=lambda done, total: steps.append((done, total)))
    config = ModelConfig.from_folder(folder)
    assert (config.model_type, config.tie_word_embeddings, config.head_dim) == (arch, tied, DIM)
    assert (config.attention_bias, config.output_bias, config.qk_norm) == (arch == "qwen2", False, arch == "qwen3")
    assert (config.rms_norm_eps, config.rope.theta, config.max_position_embeddings, config.dtype) == (1e-5, 500000.0, 2048, "bfloat16")
    loaded = load_weights(folder, config, dtype=torch.bfloat16)
    assert loaded.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(loaded[name], tensor), name
    assert steps[-1] == (len(original), len(original))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "out"]  # no temporary folder is left


def test_unpermuted_rows_turn_in_halves(tmp_path):  # FAULTS 32
    """Scores of the file's rows under neighbouring pairs equal those of the converted rows under halves."""
    make(tmp_path / "m.gguf")
    stored = {t.name: torch.from_numpy(t.data.copy()) for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    loaded = load_weights(folder, ModelConfig.from_folder(folder), dtype=torch.float32)
    x = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
    angle = torch.tensor(500000.0) ** (-torch.arange(DIM // 2) * 2 / DIM)

    def turned(rows: torch.Tensor, position: int, halves: bool) -> torch.Tensor:
        pairs = (rows @ x).unflatten(0, (-1, 2, DIM // 2) if halves else (-1, DIM // 2, 2))
        pairs = torch.complex(*pairs.unbind(1 if halves else 2))
        return pairs * torch.polar(torch.ones(DIM // 2), angle * position)

    for name, target in (("attn_q", "q_proj"), ("attn_k", "k_proj")):
        found = turned(loaded[f"model.layers.1.self_attn.{target}.weight"], 7, True)
        torch.testing.assert_close(found, turned(stored[f"blk.1.{name}.weight"], 7, False))


def test_quantised_file_within_its_precision(tmp_path):
    _, original = make(tmp_path / "m.gguf", kind="Q8_0")
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    loaded = load_weights(folder, ModelConfig.from_folder(folder), dtype=torch.float32)
    for name, tensor in original.items():
        assert (loaded[name] - tensor.float()).abs().max() <= tensor.float().abs().max() / 80, name


def llama3_factors(factor: float, theta: float = 500000.0) -> np.ndarray:
    values = []
    for i in range(DIM // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / DIM)
        smooth = (8192 / wavelength - 1) / 3
        values.append(1.0 if wavelength < 2048 else factor if wavelength > 8192 else 1 / ((1 - smooth) / factor + smooth))
    return np.array(values, dtype=np.float32)


def test_llama3_scaling_is_recovered(tmp_path):  # FAULTS 29
    make(tmp_path / "m.gguf", pre="llama-bpe", extra={"rope_freqs.weight": llama3_factors(32.0)})
    rope = ModelConfig.from_folder(convert_gguf(tmp_path / "m.gguf", tmp_path / "out")).rope
    assert (rope.type, rope.factor, rope.low_freq_factor, rope.high_freq_factor) == ("llama3", 32.0, 1.0, 4.0)
    assert rope.original_max_position_embeddings == 8192


def test_tokenizer_ids_and_files(tmp_path):
    make(tmp_path / "m.gguf", front=True)
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_folder(folder, ModelConfig.from_folder(folder))
    text = "hello 12 \n  the\té😀 x"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids[0] == 3 + PLAIN.index("hello") and ids[2:4] == [3 + PLAIN.index("1"), 3 + PLAIN.index("2")]  # digits stand alone
    assert (tokenizer.special_id("<|im_start|>"), tokenizer.special_id("<|im_end|>")) == (1, 2)
    assert tokenizer.eos_token_ids == (2, 0) and tokenizer.bos_token_id is None
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0] and json.loads((folder / "config.json").read_text())["eos_token_id"] == 2
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages }}" and settings["add_bos_token"] is False
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize("front", [False, True])
def test_added_tokens_keep_their_ids_and_kinds(tmp_path, front):
    padding = ["[PAD9]", "[PAD10]"]
    make(tmp_path / "m.gguf", "qwen2", "qwen2", front=front, plain=[*PLAIN, *padding] if front else PLAIN, user=["<think>"])
    backend = Backend.from_file(str(convert_gguf(tmp_path / "m.gguf", tmp_path / "out") / "tokenizer.json"))
    added = {token.content: (number, token.special) for number, token in backend.get_added_tokens_decoder().items()}
    start = 0 if front else len(PLAIN)
    assert added == {text: (start + i, text != "<think>") for i, text in enumerate([*CONTROL, "<think>"])}
    assert backend.token_to_id("[PAD9]") is None  # FAULTS 27: padding of the embedding is no token
    assert backend.encode("a<|im_end|><think>").tokens == ["a", "<|im_end|>", "<think>"]
    assert backend.encode("e\u0301").ids == backend.encode("é").ids  # NFC


def test_llama_bpe_groups_digits_and_ignores_merges(tmp_path):
    plain = [*PLAIN, "123", "Ġzebra"]  # whole words of the vocabulary that no merge reaches
    make(tmp_path / "m.gguf", pre="llama-bpe", plain=plain)
    folder = convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    assert backend.encode("1234 zebra", add_special_tokens=False).tokens == ["123", "4", "Ġzebra"]
    assert backend.encode("a").tokens == ["<|im_start|>", "a"]  # adds BOS unless the file says otherwise
    assert Tokenizer.from_folder(folder, ModelConfig.from_folder(folder)).bos_token_id == len(plain) + 1


@pytest.mark.parametrize(
    "options, words",
    [
        ({"pre": "gpt-4o"}, ["'gpt-4o'", "smollm, llama-bpe, qwen2"]),
        ({"arch": "qwen2", "pre": "qwen2", "drop": ("blk.1.attn_q.bias",)}, ["missing", "self_attn.q_proj.bias"]),
        ({"extra": {"blk.0.ffn_gate_inp.weight": np.zeros((4, HIDDEN), np.float32)}}, ["unknown", "ffn_gate_inp"]),
        ({"extra": {"rope_freqs.weight": np.linspace(1, 8, DIM // 2, dtype=np.float32)}}, ["rope_freqs.weight", "llama3"]),
        ({"edit": lambda w: w.add_sliding_window(128)}, ["sliding_window", "128"]),
        ({"edit": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)}, ["'yarn'", "llama3"]),
        ({"edit": lambda w: w.add_rope_dimension_count(8)}, ["rope.dimension_count", "8", "16"]),
        ({"edit": lambda w: w.add_eot_token_id(99999)}, ["eot_token_id", "99999"]),
    ],
)
def test_refusals_name_what_was_found(tmp_path, options, words):
    make(tmp_path / "m.gguf", **options)
    with pytest.raises(MinipsError) as caught:
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    message = str(caught.value)
    assert "\n" not in message and "m.gguf" in message and all(word in message for word in words), message
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_other_architecture_and_other_files(tmp_path):  # FAULTS 17
    writer = gguf.GGUFWriter(str(tmp_path / "other.gguf"), "gemma")
    writer.add_context_length(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "text.gguf").write_bytes(b"version https")
    (tmp_path / "empty.gguf").write_bytes(b"")
    expected = {"other.gguf": "'gemma'", "text.gguf": "not a GGUF", "empty.gguf": "not a GGUF", "none.gguf": "cannot be read"}
    for name, words in expected.items():
        with pytest.raises(MinipsError, match=words):
            convert_gguf(tmp_path / name, tmp_path / "out")


def test_every_cut_of_a_file_is_one_clear_error(tmp_path):
    make(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    for size in (5, 20, 100, 1000, len(data) // 2, len(data) - 1000):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(MinipsError, match="broken or cut short") as caught:
            convert_gguf(tmp_path / "cut.gguf", tmp_path / "out")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_first_of_two_processes_wins(tmp_path):
    make(tmp_path / "m.gguf")
    out = tmp_path / "out"

    def other_process(done: int, total: int) -> None:
        if done == total:
            out.mkdir()
            (out / "config.json").write_text("theirs")

    assert convert_gguf(tmp_path / "m.gguf", out, progress=other_process) == out
    assert (out / "config.json").read_text() == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "out"]


def test_gguf_package_absent(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(60))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MinipsError, match=r"minips\[demo\]"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_command_line(tmp_path, capsys):
    make(tmp_path / "m.gguf")
    assert main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    assert main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 1  # not empty any more
    captured = capsys.readouterr()
    assert captured.err.startswith("minips: error: ") and "exists already" in captured.err and captured.err.count("\n") == 1
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
