"""Fused and packed matrices: Hugging Face's names and values stay, sums stay, the base stays."""

import pytest
import torch
import torch.nn.functional as F

from minips.lora import LoraAdapter, fold, read_lora
from minips.matrix import Packed, Rows, Stacked, packable
from minips.model import Model
from minips.weights import expected_shapes, load_weights

from .support import random_tensors, tiny_config, tiny_engine

BIASED = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
CONFIGS = [tiny_config(), tiny_config(tie_word_embeddings=True), tiny_config(**BIASED)]
needs_packing = pytest.mark.skipif(not packable(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="needs oneDNN's bf16")


def bf16_model(config, packed):
    model = Model.from_tensors(config, {name: tensor.bfloat16() for name, tensor in random_tensors(config).items()})
    if packed:
        model.pack()
    return model


def attend(layer, q, k, v):
    """Every token sees itself only."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def logits_of(model, count=7):
    ids = torch.arange(count) * 11 % model.config.vocab_size
    return model.logits(model(ids, torch.arange(count), attend))


def lora_for(model, targets, scale=0.05):
    generator = torch.Generator().manual_seed(3)
    pairs = {}
    for name, shape in expected_shapes(model.config).items():
        if name.split(".")[-2] in targets and name.endswith("weight"):
            a, b = torch.randn(2, shape[1], generator=generator), torch.randn(shape[0], 2, generator=generator)
            pairs[name.removesuffix(".weight")] = (a, b, scale)
    return LoraAdapter("test", pairs)


def test_parameters_are_views_of_one_matrix():
    config = CONFIGS[2]
    tensors = random_tensors(config)
    model = Model.from_tensors(config, tensors)
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            first = 0
            for part in module.parts:
                found = getattr(module, part)
                assert found.weight.data_ptr() == module.fused.weight[first:].data_ptr()
                first += found.out_features
            assert first == len(module.fused.weight)
    assert len(model.model.layers[0].self_attn.fused.bias) == 96 + 32 + 32
    found = model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items()) and set(found) == set(tensors)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.zero_()  # seen by the matrix, as of any parameter
    assert not model.model.layers[0].mlp.fused.weight[64:].any() and model.model.layers[0].mlp.fused.weight[:64].any()


def test_a_second_model_of_the_same_tensors_copies_nothing(tmp_path):
    from safetensors.torch import save_file

    config = CONFIGS[0]
    save_file(random_tensors(config), tmp_path / "model.safetensors")
    loaded = load_weights(tmp_path, config, dtype=torch.float32)
    pointers = {name: tensor.data_ptr() for name, tensor in loaded.items()}
    for _ in range(2):
        model = Model.from_tensors(config, loaded)
        loaded = dict(model.state_dict())
        assert {name: tensor.data_ptr() for name, tensor in loaded.items()} == pointers


def test_separate_projections_give_the_same():
    model = Model.from_tensors(CONFIGS[2], random_tensors(CONFIGS[2]))
    fused = logits_of(model)
    for layer in model.model.layers:
        layer.self_attn.fused = layer.mlp.fused = None
    assert torch.allclose(logits_of(model), fused, atol=1e-5)


@needs_packing
@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "tied", "biased"])
def test_packed_is_the_plain_model(config):
    plain, packed = bf16_model(config, False), bf16_model(config, True)
    for count in (1, 4, 40):
        one, other = logits_of(plain, count), logits_of(packed, count)
        assert torch.allclose(one, other, rtol=0.03, atol=0.03) and torch.equal(one.argmax(-1), other.argmax(-1))
    first, second = plain.state_dict(), packed.state_dict()
    assert list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)
    assert isinstance(packed.model.layers[1].mlp.up_proj, Rows) and isinstance(plain.model.layers[1].mlp.fused, Stacked)
    assert (packed.head is not None) == config.tie_word_embeddings
    assert packed.lm_head.weight.shape == (config.vocab_size, config.hidden_size)
    again = Model.from_tensors(config, dict(packed.state_dict()))
    assert torch.equal(logits_of(again), logits_of(plain))


@needs_packing
@pytest.mark.parametrize("shape", [(33, 48), (960, 576), (576, 1536)])
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_packed_sums(shape, rows):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(shape).bfloat16(), torch.randn(shape[0]).bfloat16(), torch.randn(rows, shape[1]).bfloat16()
    found, exact = Packed(weight, bias)(x), F.linear(x.double(), weight.double(), bias.double())
    assert ((found - exact).abs() <= exact.abs() * 2**-8 + 1e-3).all()
    assert torch.equal(Packed(weight).dense(), weight)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_packing)])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj"), ("up_proj", "down_proj")])
def test_folding_leaves_the_base_and_shares_what_it_does_not_touch(packed, targets):
    config = CONFIGS[2]
    base = bf16_model(config, packed)
    before, expected = {name: tensor.clone() for name, tensor in base.state_dict().items()}, logits_of(base)
    lora = lora_for(base, targets)
    folded = fold(base, lora)
    for name, tensor in folded.state_dict().items():
        if name.removesuffix(".weight") in lora.pairs:
            a, b, scale = lora.pairs[name.removesuffix(".weight")]
            assert torch.equal(tensor, (before[name].float() + b @ a * scale).bfloat16()) and not torch.equal(tensor, before[name])
        else:
            assert torch.equal(tensor, before[name])
    assert all(torch.equal(before[name], tensor) for name, tensor in base.state_dict().items())
    assert torch.equal(logits_of(base), expected) and not torch.equal(logits_of(folded), expected)
    fresh = Model.from_tensors(config, dict(folded.state_dict()))
    assert torch.allclose(logits_of(folded), logits_of(fresh), rtol=0.03, atol=0.03)
    for old, new in zip(base.model.layers, folded.model.layers):
        untouched = "mlp" if "q_proj" in targets else "self_attn"
        assert getattr(old, untouched) is getattr(new, untouched) and old.input_layernorm is new.input_layernorm
        assert type(new.self_attn.fused) is type(old.self_attn.fused) and type(new.mlp.fused) is type(old.mlp.fused)


@needs_packing
def test_a_loaded_engine_is_packed_and_reads_adapters(tmp_path):
    import json

    from safetensors.torch import save_file

    from minips import Engine

    config = tiny_config(tie_word_embeddings=True)
    data = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(data))
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(config).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    engine = Engine.from_pretrained(tmp_path, max_kv_tokens=200)
    assert isinstance(engine.model.model.layers[0].self_attn.fused, Packed) and engine.dtype == torch.bfloat16
    assert all(torch.equal(engine.model.state_dict()[name], tensor) for name, tensor in tensors.items())
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "base_model_name_or_path": ""})
    )
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file({f"{name}.lora_A.weight": torch.ones(2, 48), f"{name}.lora_B.weight": torch.ones(96, 2)}, lora / "adapter_model.safetensors")
    folded = fold(engine.model, read_lora(lora, engine.model))
    assert torch.equal(folded.state_dict()[name[17:] + ".weight"], (tensors[name[17:] + ".weight"].float() + 4).bfloat16())
    assert not isinstance(Engine.from_pretrained(tmp_path, dtype="float32", max_kv_tokens=200).model.model.layers[0].mlp.fused, Packed)
    assert not isinstance(tiny_engine().model.model.layers[0].mlp.fused, Packed)
