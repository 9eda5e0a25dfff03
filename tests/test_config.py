"""Reading config.json: spellings, defaults, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from minips.config import ModelConfig, RopeConfig
from minips.errors import MinipsError
from minips.model import RMSNorm
from minips.rope import Rope

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def build(*drop: str, **changes) -> ModelConfig:
    return ModelConfig.from_dict({key: value for key, value in {**BASE, **changes}.items() if key not in drop}, "some/config.json")


def refused(*words: str, drop: tuple[str, ...] = (), **changes) -> None:
    with pytest.raises(MinipsError) as caught:
        build(*drop, **changes)
    message = str(caught.value)
    assert message.startswith("some/config.json: ") and "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("changes, tied", [({}, False), ({"tie_word_embeddings": False}, False), ({"tie_word_embeddings": True}, True)])
def test_head_is_tied_only_where_the_config_says_so(changes, tied):  # FAULTS 5
    assert build(**changes).tie_word_embeddings is tied


@pytest.mark.parametrize("hidden, heads", [(2560, 32), (5120, 64)])
def test_explicit_head_dim_wins(hidden, heads):  # FAULTS 7
    config = build(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=8, head_dim=128)
    assert config.head_dim == 128 and config.num_attention_heads * config.head_dim != hidden


def test_head_dim_defaults():  # FAULTS 7
    assert build().head_dim == 16 and build(head_dim=None).head_dim == 16
    assert build(architectures=["Qwen3ForCausalLM"], model_type="qwen3").head_dim == 128
    refused("66", "4", "head_dim", hidden_size=66)
    refused("head_dim", "15", head_dim=15)


def test_key_value_heads():  # FAULTS 8
    assert build("num_key_value_heads").num_key_value_heads == 4
    assert build(num_key_value_heads=None).num_key_value_heads == 4
    assert build(num_key_value_heads=1).num_key_value_heads == 1
    refused("4", "3", "num_key_value_heads", num_key_value_heads=3)
    refused("num_key_value_heads", "0", num_key_value_heads=0)


@pytest.mark.parametrize(
    "names",
    [{"type": "llama3"}, {"rope_type": "llama3"}, {"type": "llama3", "rope_type": "llama3"}, {"rope_type": "llama3", "rope_theta": 5e5}],
)
def test_llama3_scaling_in_every_spelling(names):  # FAULTS 9
    expected = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    found = build(rope_theta=500000.0, rope_scaling={**LLAMA3, **names}).rope
    assert found == expected == build(rope_theta=500000.0, rope_parameters={**LLAMA3, **names}).rope
    inv_freq = Rope(found, 128).inv_freq
    assert inv_freq[31].item() == pytest.approx(8.567514129e-4, rel=1e-6)


def test_no_scaling():  # FAULTS 9
    for changes in ({}, {"rope_scaling": None}, {"rope_scaling": {"rope_type": "default"}}, {"rope_parameters": {"rope_type": "default"}}):
        assert build(rope_theta=500000.0, **changes).rope == RopeConfig(500000.0)
    assert build(rope_parameters={"rope_type": "default", "rope_theta": 7e4}).rope == RopeConfig(70000.0)


def test_scaling_is_never_ignored():  # FAULTS 9
    refused("'foo'", "default, llama3", rope_scaling={"type": "foo", "factor": 2.0})
    refused("factor", "default, llama3", rope_scaling={"factor": 2.0})
    refused("mrope_section", rope_scaling={"rope_type": "default", "mrope_section": [16, 24, 24]})
    refused("llama3", "default", rope_scaling={**LLAMA3, "type": "llama3", "rope_type": "default"})
    refused("original_max_position_embeddings", rope_scaling={"rope_type": "llama3", "factor": 8.0})
    refused("rope_parameters", rope_parameters={"rope_type": "default"}, rope_scaling={"rope_type": "yarn"})
    refused("rope_scaling", "'llama3'", rope_scaling="llama3")


@pytest.mark.parametrize("kind", ["yarn", "longrope", "dynamic", "linear", "mrope"])
def test_unsupported_scaling_is_named(kind):  # FAULTS 10
    refused(repr(kind), "default, llama3", rope_scaling={"type": kind, "factor": 4})
    refused(repr(kind), "default, llama3", rope_parameters={"rope_type": kind, "factor": 4, "rope_theta": 1e6})


def test_dtype_spellings():  # FAULTS 12
    assert build(torch_dtype="bfloat16").dtype == "bfloat16" == build(dtype="bfloat16").dtype
    assert build(dtype="float16", torch_dtype="float32").dtype == "float16"
    assert build().dtype == "float32"
    refused("'int8'", "bfloat16", dtype="int8")


@pytest.mark.parametrize("eps, value", [(1e-6, 0.707107), (1e-5, 0.301511)])
def test_norm_epsilon_is_passed_on(eps, value):  # FAULTS 15
    config = build(rms_norm_eps=eps)
    out = RMSNorm(64, config.rms_norm_eps)(torch.full((64,), 1e-3))
    assert out.tolist() == pytest.approx([value] * 64, rel=1e-5)


def test_other_architectures_are_refused():  # FAULTS 17
    refused("MistralForCausalLM", "LlamaForCausalLM", architectures=["MistralForCausalLM"], model_type="mistral")
    refused("Qwen2ForCausalLM", architectures=["Qwen2ForCausalLM"], model_type="llama")
    refused("no architecture", drop=("architectures", "model_type"))
    assert build("architectures").model_type == "llama" == build("model_type").model_type


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"sliding_window": 4096, "use_sliding_window": True}, ["sliding_window", "4096"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"vocab_size": "many"}, ["vocab_size", "'many'"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
        ({"layer_types": 3}, ["layer_types"]),
    ],
)
def test_features_not_implemented_are_refused(changes, words):  # FAULTS 17
    refused(*words, **changes)


def test_inactive_sliding_window_is_accepted():  # FAULTS 17
    config = build(architectures=["Qwen2ForCausalLM"], model_type="qwen2", sliding_window=131072, use_sliding_window=False)
    assert config.attention_bias and not config.output_bias and not config.qk_norm


def test_attention_bias():  # FAULTS 17
    config = build(attention_bias=True)
    assert config.attention_bias and config.output_bias
    assert build(architectures=["Qwen3ForCausalLM"], model_type="qwen3").qk_norm


def test_end_tokens_as_number_list_or_nothing():  # FAULTS 20
    assert build(eos_token_id=7).eos_token_ids == (7,) and build(eos_token_id=[7, 9]).eos_token_ids == (7, 9)
    assert build().eos_token_ids == () == build(eos_token_id=None).eos_token_ids
    refused("eos_token_id", "'x'", eos_token_id="x")


def test_broken_files(tmp_path):
    for text in ("{", "[]", "\x00", json.dumps({"model_type": "llama"})):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(MinipsError, match=r"config\.json: ") as caught:
            ModelConfig.from_folder(tmp_path)
        assert "\n" not in str(caught.value)
    with pytest.raises(MinipsError, match="no such file"):
        ModelConfig.from_folder(tmp_path / "nowhere")
