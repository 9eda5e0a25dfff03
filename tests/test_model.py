"""The model against the float64 reference and against transformers. FAULTS items 4, 15, 16, 53."""

import pytest
import torch
from safetensors.torch import load_file

from minips import Engine
from minips.config import ModelConfig
from minips.model import Model, RMSNorm
from tests.reference import Reference
from tests.support import GOLDEN, prompt_ids, random_tensors, relative_error, tiny_config, tiny_engine

FAMILIES = {
    "llama": {},
    "llama3-scaled-tied": {
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mha": {"num_key_value_heads": 6},
    "mqa-wide-heads": {"num_key_value_heads": 1, "head_dim": 32},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6},
}  # fmt: skip


def stepwise_logits(engine, ids, sizes):
    """Logits at each position, fed in pieces of the given sizes."""
    branch, out, done = None, [], 0
    for size in sizes:
        piece = ids[done : done + size]
        if branch is None:
            branch = engine.prefill(piece)
        else:
            engine.append([branch], [piece])
        out.append(branch.next_logits)
        done += size
    branch.close()
    return torch.stack(out)


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_and_steps_equal_the_reference(name):  # FAULTS 16, 37
    config = tiny_config(**FAMILIES[name])
    tensors = random_tensors(config, seed=3)
    engine, ids = tiny_engine(config, tensors=tensors), prompt_ids(9, 5)
    expected = Reference(tensors, config).plain(ids)
    whole = engine.generate(ids, engine_params(1))
    assert relative_error(whole.logits[: len(ids)], expected) < 1e-5
    assert relative_error(stepwise_logits(engine, ids, [1] * 9), expected) < 1e-5
    assert relative_error(stepwise_logits(engine, ids, [4, 3, 2]), expected[[3, 6, 8]]) < 1e-5


def engine_params(count):
    from minips import SamplingParams

    return SamplingParams(max_tokens=count, return_logits=True)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_golden_models_equal_transformers(name):
    transformers = pytest.importorskip("transformers")
    folder = GOLDEN / "models" / name
    config = ModelConfig.from_folder(folder)
    engine = tiny_engine(config, tensors=load_file(folder / "model.safetensors"), max_kv_tokens=2000)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = prompt_ids(150, 1, config.vocab_size)
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    assert relative_error(engine.generate(ids, engine_params(1)).logits[:150], expected) < 1e-4
    assert relative_error(stepwise_logits(engine, ids, [1] * 150), expected) < 1e-4


def test_k_norm_weights_matter_on_both_paths():  # FAULTS 16
    config = tiny_config(**FAMILIES["qwen3"])
    tensors = random_tensors(config)
    for name in tensors:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensors[name] = torch.full_like(tensors[name], 2.0)
    changed = {k: v * 1.5 if k.endswith("k_norm.weight") else v for k, v in tensors.items()}
    ids = prompt_ids(6)
    outs = [stepwise_logits(tiny_engine(config, tensors=t), ids, sizes) for t in (tensors, changed) for sizes in ([1] * 6, [6])]
    assert relative_error(outs[0][-1], outs[1][-1]) < 1e-4 and relative_error(outs[2][-1], outs[3][-1]) < 1e-4
    assert relative_error(outs[0][-1], outs[2][-1]) > 1e-3


@pytest.mark.parametrize("eps, value", [(1e-6, 0.707107), (1e-5, 0.301511)])
def test_norm_uses_the_given_epsilon(eps, value):  # FAULTS 15
    out = RMSNorm(64, eps)(torch.full((1, 64), 1e-3))
    assert torch.allclose(out, torch.full((1, 64), value), atol=1e-6)


def test_every_norm_has_the_configs_epsilon():  # FAULTS 15
    config = tiny_config(**{**FAMILIES["qwen3"], "rms_norm_eps": 3e-4})
    norms = [m for m in Model(config).modules() if isinstance(m, RMSNorm)]
    assert len(norms) == 4 * 2 + 1 and {norm.eps for norm in norms} == {3e-4}


def test_a_tied_head_is_the_embeddings_own_storage():  # FAULTS 4
    config = tiny_config(tie_word_embeddings=True)
    model = Model.from_tensors(config, random_tensors(config))
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_prefill_applies_the_head_to_the_last_position_only(monkeypatch):  # FAULTS 53
    engine, seen = tiny_engine(prefill_chunk=16), []
    plain = Model.logits
    monkeypatch.setattr(Model, "logits", lambda self, hidden: seen.append(len(hidden)) or plain(self, hidden))
    engine.prefill(prompt_ids(60)).close()
    assert seen == [1]


def test_bf16_follows_fp32():
    config = tiny_config()
    tensors, ids = random_tensors(config), prompt_ids(20)
    exact = tiny_engine(config, tensors=tensors).prefill(ids).next_logits
    rounded = tiny_engine(config, tensors=tensors, dtype=torch.bfloat16).prefill(ids).next_logits
    assert rounded.dtype == torch.float32 and relative_error(rounded, exact) < 0.05


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_folders_written_by_transformers_give_its_logits(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": family == "Qwen2",
    }  # fmt: skip
    if family == "Qwen3":
        sizes["head_dim"] = 32
    torch.manual_seed(0)
    oracle = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes)).eval()
    for name, parameter in oracle.named_parameters():
        parameter.data.add_(torch.randn_like(parameter) * (0.3 if name.endswith("bias") else 0.1))
    oracle.save_pretrained(tmp_path)
    engine, ids = Engine.from_pretrained(tmp_path), prompt_ids(40, 2)
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    assert relative_error(engine.generate(ids, engine_params(1)).logits[:40], expected) < 1e-4
    assert relative_error(stepwise_logits(engine, ids, [1] * 40), expected) < 1e-4
