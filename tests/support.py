"""Tiny random models and engines for the tests: of token ids only, or with a byte tokenizer and a chat format."""

from __future__ import annotations

from pathlib import Path

import torch

from minips import SamplingParams, Synthesizer
from minips.chat import detect_format
from minips.config import EngineConfig, ModelConfig
from minips.engine import Engine
from minips.model import Model
from minips.weights import expected_shapes

from .toy_tokenizers import toy_tokenizer

GOLDEN = Path(__file__).parent / "golden"


def tiny_config(**changes) -> ModelConfig:
    data = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "dtype": "float32",
        **changes,
    }
    return ModelConfig.from_dict(data)


def random_tensors(config: ModelConfig, seed: int = 0, scale: float = 0.12) -> dict[str, torch.Tensor]:
    """Seeded noise, scaled so that logits are far from ties and attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.1 * noise
        else:
            tensors[name] = noise * scale * (3 if any(part in name for part in ("embed", "q_proj", "k_proj")) else 1)
    return tensors


def tiny_engine(
    config: ModelConfig | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    page_size: int = 4,
    max_kv_tokens: int = 1200,
    prefill_chunk: int = 512,
    poison: float | None = None,
    tensors: dict | None = None,
) -> Engine:
    config = config or tiny_config()
    tensors = tensors if tensors is not None else random_tensors(config, seed)
    model = Model.from_tensors(config, {name: tensor.to(dtype) for name, tensor in tensors.items()})
    settings = EngineConfig("cpu", "auto", "auto", page_size, max_kv_tokens, prefill_chunk)
    engine = Engine(model, config, settings=settings)
    fill_pool(engine, 0.0 if poison is None else poison)
    return engine


def fill_pool(engine: Engine, value: float) -> None:
    """Put one value into every page: fresh memory holds anything, NaN too, which equals nothing."""
    for tensor in (*engine.pool.keys, *engine.pool.values):
        tensor[1:] = value


def chat_engine(kind="chatml", max_kv_tokens=4000, **changes):
    """A tiny random model with a byte tokenizer and a chat format."""
    config = tiny_config(vocab_size=300, **{"max_position_embeddings": 2048, **changes})
    tokenizer = toy_tokenizer(kind)
    model = Model.from_tensors(config, random_tensors(config))
    settings = EngineConfig("cpu", "auto", "auto", 4, max_kv_tokens)
    return Engine(model, config, tokenizer=tokenizer, chat=detect_format(None, tokenizer), settings=settings)


def golden_engine(name: str, **settings) -> Engine:
    from safetensors.torch import load_file

    folder = GOLDEN / "models" / name
    return tiny_engine(ModelConfig.from_folder(folder), tensors=load_file(folder / "model.safetensors"), max_kv_tokens=4096, **settings)


def prompt_ids(length: int, seed: int = 0, vocab: int = 97) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest magnitude."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


# One set of three workers, and what a synthesizer makes of them

LOGITS = SamplingParams(max_tokens=1, return_logits=True)
PREFIX, U = prompt_ids(10), prompt_ids(6, 50)
OWNS = [prompt_ids(5, 1), prompt_ids(2, 2), prompt_ids(9, 3)]
OUTS = [prompt_ids(7, 11), prompt_ids(12, 12), prompt_ids(3, 13)]


def branches_of(engine, owns=OWNS, outs=OUTS, prefix=PREFIX):
    root = engine.prefill(prefix)
    made = engine.encode(engine.fork(root, owns), outs)
    root.close()
    return made


def u_logits(engine, branches, u=U, **options):
    result = Synthesizer(engine, options=options).generate_from_caches(branches, u, LOGITS)
    return result.logits[: len(u)]
