"""The real shapes of Llama-3.1-8B, random weights: loading, workers, a folded LoRA, a merge and an answer within 22 GiB.

    python -m pytest -m slow tests/test_big_model.py -s

Needs 17 GB of disk in the temporary folder and some minutes; peak memory and times are printed.
"""

import json
import resource
import shutil
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from minips import Engine, SamplingParams, Synthesizer
from minips.config import ModelConfig
from minips.weights import INDEX, expected_shapes

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip
LIMIT_GIB = 22


def write_model(folder, config, per_shard=36):
    """Sharded random bf16 weights; never more than one shard in memory."""
    (folder / "config.json").write_text(json.dumps(LLAMA_31_8B))
    shapes = list(expected_shapes(config).items())
    parts = [shapes[at : at + per_shard] for at in range(0, len(shapes), per_shard)]
    weight_map = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = {key: torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.02, 0.02) for key, shape in part}
        for key in tensors:
            if key.endswith("norm.weight"):
                tensors[key].fill_(1.0)
        save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def write_lora(folder, config, rank=16):
    shapes, tensors = expected_shapes(config), {}
    for layer in range(config.num_hidden_layers):
        for part in "qkvo":
            rows, columns = shapes[f"model.layers.{layer}.self_attn.{part}_proj.weight"]
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns) * 0.02
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, 1).expand(rows, rank).contiguous() * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def peak_gib():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


@pytest.mark.slow
def test_llama_31_8b_shapes_run_within_22_gib(tmp_path):
    config = ModelConfig.from_dict(LLAMA_31_8B)
    marks = [("start", time.perf_counter())]

    def mark(name):
        marks.append((name, time.perf_counter()))
        print(f"{name}: {marks[-1][1] - marks[-2][1]:.1f} s, peak {peak_gib():.2f} GiB", flush=True)

    model = tmp_path / "model"
    model.mkdir()
    try:
        write_model(model, config)
        write_lora(tmp_path / "lora", config)
        mark("write")
        engine = Engine.from_pretrained(model, max_kv_tokens=2048)
        mark("load")
        assert sum(parameter.numel() for parameter in engine.model.parameters()) == 8_030_261_248
        assert engine.kv_bytes_per_token == 131072 and engine.dtype == torch.bfloat16
        prefix = engine.prefill(list(range(1000, 1048)))
        branches = engine.fork(prefix, [[j, j + 1, j + 2] for j in range(4)])
        mark("prefill and fork")
        engine.decode(branches, SamplingParams(max_tokens=8, temperature=1.0, seed=0))
        mark("decode 4 x 8")
        synthesizer = Synthesizer(engine, tmp_path / "lora")
        mark("fold")
        prefix.close()
        result = synthesizer.generate_from_caches(branches, list(range(500, 516)), SamplingParams(max_tokens=4, return_logits=True))
        mark("merge and answer")
        assert result.num_branches == 4 and len(result.token_ids) == 4 and torch.isfinite(result.logits).all()
        shared = engine.model.model.layers[0].mlp.up_proj.weight
        assert synthesizer.model.model.layers[0].mlp.up_proj.weight.data_ptr() == shared.data_ptr()
        assert engine.check() and engine.stats()["used_pages"] == 0
        assert peak_gib() < LIMIT_GIB
    finally:
        shutil.rmtree(model)
