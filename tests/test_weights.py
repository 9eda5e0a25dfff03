"""The strict loader: what it reads, what it refuses and how it says so; the fingerprint."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from minips.config import ModelConfig
from minips.errors import MinipsError
from minips.model import Model
from minips.weights import INDEX, SINGLE, expected_shapes, fingerprint, load_weights, resolve_device, resolve_dtype

BASE = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def config_of(**changes) -> ModelConfig:
    return ModelConfig.from_dict({**BASE, **changes})


def tensors_of(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in expected_shapes(config).items()}


def single(folder, tensors):
    save_file(tensors, folder / SINGLE)
    return folder


def sharded(folder, tensors, cut: int = 5):
    names = list(tensors)
    parts = {SHARDS[0]: names[:cut], SHARDS[1]: names[cut:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def load(folder, config, dtype=torch.float32):
    return load_weights(folder, config, dtype=dtype, device="cpu")


def refused(folder, config, *words: str, dtype=torch.float32) -> str:
    with pytest.raises(MinipsError) as caught:
        load(folder, config, dtype)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message
    return message


def assert_same(loaded, tensors):
    assert list(loaded) == list(tensors)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_missing_shard_is_named(tmp_path):  # FAULTS 1
    config = config_of()
    sharded(tmp_path, tensors_of(config))
    (tmp_path / SHARDS[1]).unlink()
    message = refused(tmp_path, config, SHARDS[1], str(tmp_path), "incomplete")
    assert SHARDS[0] not in message


def test_tensor_missing_from_the_files_is_named(tmp_path):  # FAULTS 1
    config = config_of()
    tensors = tensors_of(config)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    refused(single(tmp_path, tensors), config, "missing", "model.layers.1.mlp.up_proj.weight", SINGLE)


def test_index_naming_a_file_without_the_tensor(tmp_path):  # FAULTS 1
    config = config_of()
    sharded(tmp_path, tensors_of(config))
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = SHARDS[0]
    (tmp_path / INDEX).write_text(json.dumps(index))
    refused(tmp_path, config, "model.norm.weight", SHARDS[0])


def test_stray_files_are_not_read(tmp_path):  # FAULTS 2
    config = config_of()
    tensors = tensors_of(config)
    sharded(tmp_path, tensors)
    single(tmp_path, tensors_of(config, seed=9))
    save_file({"output.weight": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "another.safetensors").write_bytes(b"not even a header")
    assert_same(load(tmp_path, config), tensors)


def test_single_file_without_an_index(tmp_path):  # FAULTS 3
    config = config_of()
    tensors = tensors_of(config)
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    assert_same(load(single(tmp_path, tensors), config), tensors)


def test_bin_only_is_refused(tmp_path):  # FAULTS 3
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    refused(tmp_path, config_of(), "no *.safetensors", "pytorch_model.bin")
    (tmp_path / "other.safetensors").write_bytes(b"x")
    refused(tmp_path, config_of(), SINGLE, "other.safetensors")
    refused(tmp_path / "nowhere", config_of(), "no such folder")


def test_tied_head_shares_the_embedding(tmp_path):  # FAULTS 4
    config = config_of(tie_word_embeddings=True)
    loaded = load(single(tmp_path, tensors_of(config)), config)
    assert "lm_head.weight" not in loaded
    model = Model.from_tensors(config, loaded)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model.logits(hidden), hidden @ loaded["model.embed_tokens.weight"].T)


def test_stored_head_of_a_tied_model(tmp_path):  # FAULTS 4
    config = config_of(tie_word_embeddings=True)
    tensors = tensors_of(config)
    single(tmp_path, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert_same(load(tmp_path, config), tensors)
    single(tmp_path, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    refused(tmp_path, config, "lm_head.weight", "tie_word_embeddings")


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}])
def test_untied_head_is_used_and_demanded(tmp_path, changes):  # FAULTS 5
    config = config_of(**changes)
    tensors = tensors_of(config)
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert_same(load(single(tmp_path, tensors), config), tensors)
    del tensors["lm_head.weight"]
    refused(single(tmp_path, tensors), config, "lm_head.weight", "tie_word_embeddings")


def test_lfs_pointer_is_recognised(tmp_path):  # FAULTS 6
    pointer = b"version https://git-lfs.example/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    (tmp_path / SINGLE).write_bytes(pointer)
    refused(tmp_path, config_of(), str(tmp_path / SINGLE), "Git LFS pointer", "not downloaded")


def test_explicit_head_dim_gives_the_shapes():  # FAULTS 7
    for hidden, heads in ((2560, 32), (5120, 64)):
        sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128}
        shapes = expected_shapes(config_of(model_type="qwen3", **sizes))
        layer = "model.layers.0.self_attn"
        assert shapes[f"{layer}.q_proj.weight"] == (heads * 128, hidden) and shapes[f"{layer}.o_proj.weight"] == (hidden, heads * 128)
        assert shapes[f"{layer}.k_proj.weight"] == shapes[f"{layer}.v_proj.weight"] == (1024, hidden)
        assert shapes[f"{layer}.q_norm.weight"] == shapes[f"{layer}.k_norm.weight"] == (128,)


def test_dtype_stays_or_is_converted(tmp_path):  # FAULTS 12
    config = config_of(torch_dtype="bfloat16")
    tensors = tensors_of(config, dtype=torch.bfloat16)
    single(tmp_path, tensors)
    assert_same(load(tmp_path, config, resolve_dtype("auto", config)), tensors)
    assert_same(load(tmp_path, config, torch.float32), {name: tensor.float() for name, tensor in tensors.items()})


def test_float16_overflow_is_refused(tmp_path):
    config = config_of()
    tensors = tensors_of(config)
    tensors["model.norm.weight"][3] = 1e6
    refused(single(tmp_path, tensors), config, "model.norm.weight", "float16", dtype=torch.float16)
    assert_same(load(tmp_path, config), tensors)


def test_resolve_dtype_and_device():  # FAULTS 12
    config = config_of(dtype="bfloat16")
    found = [resolve_dtype(name, config) for name in ("auto", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32")]
    assert found == [torch.bfloat16] * 3 + [torch.float16] * 2 + [torch.float32] * 2
    with pytest.raises(MinipsError, match="'int3'.*bfloat16"):
        resolve_dtype("int3", config)
    assert resolve_device("cpu") == resolve_device("cpu:0") == torch.device("cpu")
    for name in ("gpu", "meta", "cpu:1", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(MinipsError, match=f"'{name}'"):
            resolve_device(name)


def test_position_buffers_are_skipped_and_unknown_tensors_refused(tmp_path):  # FAULTS 13
    config = config_of()
    tensors = tensors_of(config)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "rope.freqs": torch.ones(8)}
    single(tmp_path, {**tensors, **old})
    assert_same(load(tmp_path, config), tensors)
    bogus = {f"model.layers.99.mlp.{name}_proj.weight": torch.ones(2) for name in ("up", "gate")}
    refused(single(tmp_path, {**tensors, **old, **bogus}), config, "2 tensor(s)", "model.layers.99.mlp.up_proj.weight")


def test_a_bias_is_never_dropped_silently(tmp_path):  # FAULTS 17
    biased = config_of(attention_bias=True)
    tensors = tensors_of(biased)
    assert tensors["model.layers.0.self_attn.o_proj.bias"].shape == (32,)
    single(tmp_path, tensors)
    assert_same(load(tmp_path, biased), tensors)
    refused(tmp_path, config_of(), "8 tensor(s)", "bias")
    assert "model.layers.0.self_attn.o_proj.bias" not in expected_shapes(config_of(model_type="qwen2"))


def test_all_shape_mismatches_in_one_message(tmp_path):  # FAULTS 14
    config = config_of(num_hidden_layers=12)
    tensors = tensors_of(config)
    tensors["model.norm.weight"] = torch.ones(1)
    for layer in range(12):
        tensors[f"model.layers.{layer}.self_attn.k_proj.weight"] = torch.ones(64, 32)
    message = refused(sharded(tmp_path, tensors), config, "13 tensor(s)", "expected [32, 32], found [64, 32]")
    assert message.count("k_proj") == 10 and f"k_proj.weight in {SHARDS[1]}" in message
    for layer in range(12):
        tensors[f"model.layers.{layer}.self_attn.k_proj.weight"] = torch.ones(32, 32)
    refused(sharded(tmp_path, tensors), config, "model.norm.weight", "expected [32], found [1]")


@pytest.mark.parametrize("name", ["../model.safetensors", "sub/model.safetensors", "/etc/x.safetensors", "a\\b.safetensors", "x.bin"])
def test_index_cannot_leave_the_folder(tmp_path, name):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    refused(tmp_path, config_of(), repr(name), INDEX)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "{"])
def test_broken_index(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    refused(tmp_path, config_of(), INDEX)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        b"\x05" + bytes(7) + b"{",
        b"\x04" + bytes(7) + b"[1]x",
        b"\x02" + bytes(7) + b"[]",
        b"\x07" + bytes(7) + b'{"a":3}',
        b"\x37" + bytes(7) + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}} ' + bytes(8),
        b"\x38" + bytes(7) + b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}} ' + bytes(8),
    ],
)
def test_corrupt_header_is_one_clear_line(tmp_path, data):
    (tmp_path / SINGLE).write_bytes(data)
    refused(tmp_path, config_of(), str(tmp_path / SINGLE))


def test_file_cut_short(tmp_path):
    config = config_of()
    single(tmp_path, tensors_of(config))
    data = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(data[:-100])
    refused(tmp_path, config, "cut short", SINGLE)


def test_quantised_storage_is_refused(tmp_path):
    config = config_of()
    tensors = tensors_of(config)
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)
    refused(single(tmp_path, tensors), config, "model.norm.weight is I8", "BF16")


def test_fingerprint_follows_content_not_layout(tmp_path):
    config = config_of()
    tensors = tensors_of(config)
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
    first = fingerprint(single(folders[0], tensors), config)
    assert first == fingerprint(sharded(folders[1], dict(reversed(tensors.items())), 7), config)
    assert len(first) == 32 and int(first, 16) >= 0
    changed = {**tensors, "model.norm.weight": tensors["model.norm.weight"] * 1.5}
    assert fingerprint(single(folders[2], changed), config) != first
    assert fingerprint(single(folders[3], {k: v.bfloat16() for k, v in tensors.items()}), config) != first
    assert fingerprint(folders[0], replace(config, rms_norm_eps=3e-6)) != first
    assert fingerprint(folders[0], replace(config, rope=replace(config.rope, theta=5.0))) != first
    assert fingerprint(folders[0], replace(config, eos_token_ids=(1,), dtype="bfloat16", max_position_embeddings=7)) == first
