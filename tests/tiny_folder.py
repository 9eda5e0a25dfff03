"""A tiny random model as a Hugging Face folder with a byte tokenizer and the chatml format, for tests that start from files."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from minips.config import ModelConfig

from .support import random_tensors
from .toy_tokenizers import CHATML, toy_backend

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "eos_token_id": 266,
    "bos_token_id": None,
}


def write_model(folder: Path, shards: int = 1, **changes) -> Path:
    """Make the folder; `changes` go into config.json. More than one shard come with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(data, indent=1))
    tensors = random_tensors(ModelConfig.from_dict(data))
    names = sorted(tensors)
    files = ["model.safetensors"] if shards == 1 else [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    parts = {file: names[index::shards] for index, file in enumerate(files)}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    if shards > 1:
        weight_map = {name: file for file, part in parts.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    toy_backend(CHATML).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "add_bos_token": False}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [266, 264]}))
    return folder
