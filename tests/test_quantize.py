"""Weight-only int8 and int4: stored grids come back, few and many rows agree, and the default model hardly changes."""

import json
import pydoc_data.topics

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from minips import Engine, MinipsError, SamplingParams, Synthesizer
from minips.adapter import Adapter
from minips.config import MergeOptions
from minips.matrix import Packed
from minips.model import Model
from minips.quantize import BLOCK, FEW_ROWS, Int4, Int8, grids, quantize, values, weight_bytes

from .support import branches_of, prompt_ids, random_tensors, tiny_config, tiny_engine
from .test_fused import logits_of, lora_for

CONFIG = tiny_config(hidden_size=64, head_dim=16, num_attention_heads=4, intermediate_size=96, tie_word_embeddings=True)
GREEDY = SamplingParams(max_tokens=8)


def bf16_model(config=CONFIG):
    return Model.from_tensors(config, {name: tensor.bfloat16() for name, tensor in random_tensors(config).items()})


def quantised(kind, config=CONFIG):
    model = bf16_model(config)
    quantize(model, kind)
    return model


def on_grids(rows, blocks, used, symmetric):
    """bf16 weights as they come from a Q4_0 (symmetric) or Q4_1 file, whose blocks use codes from 0 to at least `used`."""
    generator = torch.Generator().manual_seed(rows + used)
    codes = torch.randint(0, used + 1, (rows, blocks, BLOCK), generator=generator)
    codes[..., 0], codes[..., 1] = 0, used
    step = (torch.rand(rows, blocks, 1, generator=generator) * 0.02 + 0.001).half().float()
    low = -8 * step if symmetric else (-step * torch.rand(rows, blocks, 1, generator=generator) * 15).half().float()
    return (codes * step + low).flatten(1).bfloat16()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("used", [15, 14, 11, 8])
def test_stored_4_bit_blocks_come_back(symmetric, used):
    weight = on_grids(40, 6, used, symmetric)
    error = (values(*grids(weight)).float() - weight.float()).norm() / weight.float().norm()
    assert error < 0.006  # bf16 alone leaves 0.002; blocks spread over 16 values anew where 9 were in use are 0.05 off
    if used < 15:
        low, high = weight.float().view(-1, BLOCK).aminmax(dim=1, keepdim=True)
        step = (high - low) / 15
        naive = ((weight.float().view(-1, BLOCK) - low) / step).round() * step + low
        assert (naive.view(weight.shape) - weight.float()).norm() / weight.float().norm() > 3 * error


def test_other_weights_are_within_half_a_step():
    torch.manual_seed(0)
    weight = torch.randn(50, 4 * BLOCK).bfloat16()
    codes, scales, zeros = grids(weight)
    assert codes.max() == 15 and codes.min() == 0 and codes.dtype == torch.uint8 and scales.shape == zeros.shape == (50, 4)
    off = (values(codes, scales, zeros).float() - weight.float()).abs().unflatten(1, (-1, BLOCK)).amax(-1)
    assert (off < 0.8 * scales.float()).all()
    flat = torch.full((2, BLOCK), 0.25).bfloat16()
    assert torch.equal(values(*grids(flat)), flat) and not values(*grids(flat * 0)).any()


@pytest.mark.parametrize("form", [Int8, Int4])
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_few_and_many_rows_give_the_product_of_the_codes(form, beside, bias):
    torch.manual_seed(1)
    weight, bias = torch.randn(80, 96).bfloat16(), torch.randn(80).bfloat16() if bias else None
    matrix = form(weight, bias, beside=beside)
    assert (matrix.dense().float() - weight.float()).norm() / weight.float().norm() < (0.01 if form is Int8 else 0.12)
    for rows in (1, FEW_ROWS["int8"], FEW_ROWS["int4"], FEW_ROWS["int4"] + 1, 40):
        x = torch.randn(rows, 96).bfloat16()
        exact = F.linear(x.double(), matrix.dense().double(), bias.double() if bias is not None else None)
        assert ((matrix(x) - exact).abs() <= 0.02 * exact.abs() + 0.08).all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantised_model_keeps_names_and_answers_alike_in_any_batch(kind):
    model, plain = quantised(kind), bf16_model()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight) and isinstance(model.head, Int8)
    assert not torch.equal(model.state_dict()["model.layers.0.mlp.up_proj.weight"], plain.state_dict()["model.layers.0.mlp.up_proj.weight"])
    exact = Model.from_tensors(CONFIG, {name: tensor.float() for name, tensor in model.state_dict().items()})
    for rows in (1, 3, 20):
        found, expected = logits_of(model, rows), logits_of(exact, rows)
        assert (found - expected).norm() / expected.norm() < 0.03


def test_a_large_model_keeps_only_the_codes(monkeypatch):
    plain = weight_bytes(bf16_model())
    both = weight_bytes(quantised("int4"))
    monkeypatch.setattr("minips.quantize.BESIDE", 0)
    codes = {kind: weight_bytes(quantised(kind)) for kind in ("int8", "int4")}
    assert codes["int4"] < codes["int8"] < plain < both
    linear = sum(tensor.numel() for name, tensor in bf16_model().state_dict().items() if "_proj" in name)
    assert codes["int8"] - codes["int4"] == linear - linear // 2 - linear // 8 + 2 * sum(  # 4 bits and 32 for 32; a scale a row
        len(tensor) for name, tensor in bf16_model().state_dict().items() if "_proj" in name
    )


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_synthesizer_folds_into_bf16_beside_shared_quantised_mlps(kind):
    config = CONFIG
    engine = tiny_engine(config, dtype=torch.bfloat16)
    quantize(engine.model, kind)
    lora = lora_for(engine.model, ("q_proj", "k_proj", "v_proj", "o_proj"), 0.01)
    synthesizer = Synthesizer(engine, Adapter("test", None, lora, MergeOptions()))
    for base, folded in zip(engine.model.model.layers, synthesizer.model.model.layers):
        assert folded.mlp is base.mlp and isinstance(folded.self_attn.o_proj.matrix, Packed) and isinstance(folded.self_attn.fused, Packed)
        assert isinstance(base.self_attn.fused, (Int8, Int4))
    for name, (a, b, scale) in lora.pairs.items():
        before, after = engine.model.get_submodule(name).weight, synthesizer.model.get_submodule(name).weight
        assert torch.equal(after, (before.float() + b @ a * scale).bfloat16())
    assert synthesizer.model.head is engine.model.head
    result = synthesizer.generate_from_caches(branches_of(engine), prompt_ids(6, 50), GREEDY)
    assert len(result.token_ids) == 8 and engine.pool.check()


def saved(folder, config=CONFIG, **changes):
    folder.mkdir(exist_ok=True)
    data = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": 2, "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "rope_theta": 10000.0,
        "tie_word_embeddings": config.tie_word_embeddings, "torch_dtype": "bfloat16", "eos_token_id": 1, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(data))
    save_file({name: tensor.bfloat16() for name, tensor in random_tensors(config).items()}, folder / "model.safetensors")
    return folder


def test_engines_load_quantised_and_refuse_what_they_cannot(tmp_path):
    folder = saved(tmp_path / "good")
    plain = Engine.from_pretrained(folder, max_kv_tokens=200)
    for kind, form in (("int8", Int8), ("int4", Int4)):
        engine = Engine.from_pretrained(folder, quantize=kind, max_kv_tokens=200)
        assert isinstance(engine.model.model.layers[0].mlp.fused, form) and engine.settings.quantize == kind
        assert engine.fingerprint == plain.fingerprint  # adapters of these weights fit
        assert engine.generate(prompt_ids(9), GREEDY).token_ids == engine.generate(prompt_ids(9), GREEDY).token_ids
    with pytest.raises(MinipsError, match="quantize is 'int2', expected none, int8 or int4"):
        Engine.from_pretrained(folder, quantize="int2")
    with pytest.raises(MinipsError, match="int4 needs bfloat16 weights, these are float32"):
        Engine.from_pretrained(folder, quantize="int4", dtype="float32", max_kv_tokens=200)
    odd = saved(tmp_path / "odd", tiny_config())
    with pytest.raises(MinipsError, match=r"int4 needs inputs in multiples of 32.*q_proj.weight is \[96, 48\]"):
        Engine.from_pretrained(odd, quantize="int4", max_kv_tokens=200)
    assert Engine.from_pretrained(odd, quantize="int8", max_kv_tokens=200).generate(prompt_ids(9), GREEDY).token_ids


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "divergence", "same"), [("int8", 0.02, 0.93), ("int4", 0.02, 0.95)])
def test_quality_on_the_default_model(default_model, kind, divergence, same):
    """1,000 teacher-forced positions of English: mean KL against bf16 and top-1 agreement. int4 is nearer, for its grids are the stored ones."""
    engines = [Engine.from_pretrained(default_model, quantize=name, max_kv_tokens=1024) for name in ("none", kind)]
    text = "\n".join(pydoc_data.topics.topics[name] for name in ("exceptions", "context-managers", "typesseq"))
    ids = engines[0].tokenizer.encode(text)[:1000]
    one, other = (engine.generate(ids, SamplingParams(max_tokens=1, return_logits=True)).logits[: len(ids)] for engine in engines)
    one, other = one.log_softmax(-1), other.log_softmax(-1)
    loss = float((one.exp() * (one - other)).sum(-1).mean())
    agreement = float((one.argmax(-1) == other.argmax(-1)).float().mean())
    print(f"{kind}: mean KL {loss:.4f}, top-1 agreement {agreement:.1%}")
    assert len(one) == 1000 and loss <= divergence and agreement >= same


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_int4_on_cuda():
    torch.manual_seed(1)
    weight = torch.randn(128, 256).bfloat16().cuda()
    matrix, x = Int4(weight), torch.randn(3, 256).bfloat16().cuda()
    expected = F.linear(x.float(), values(*grids(weight)).float())
    assert (matrix(x).float() - expected).norm() / expected.norm() < 0.01
