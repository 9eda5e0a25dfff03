"""What the speed benches run on: a model by name or random weights of a named size, transformers on the same folder, made-up workers."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import say
from safetensors.torch import save_file

from minips import Engine, MinipsError, Synthesizer
from minips.adapter import Adapter, new_mapper
from minips.config import DEFAULT_MODEL, MergeOptions, ModelConfig
from minips.hub import resolve_model
from minips.mapper import CacheMapper, MapperConfig
from minips.weights import INDEX, expected_shapes

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}
_SCALED = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_3 = {**_LLAMA, "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 131072, "num_key_value_heads": 8}
SHAPES = {  # of SmolLM2-135M, Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B
    "135m": {
        **_LLAMA, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "rope_theta": 100000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "1b": {
        **_LLAMA_3, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64,
        "rope_scaling": _SCALED, "tie_word_embeddings": True,
    },
    "3b": {
        **_LLAMA_3, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128,
        "rope_scaling": _SCALED, "tie_word_embeddings": True,
    },
    "8b": {
        **_LLAMA_3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128,
        "rope_scaling": {**_SCALED, "factor": 8.0}, "tie_word_embeddings": False,
    },
}  # fmt: skip
PREFIX = 16  # tokens of c_sh
SHARD = 1 << 31  # bytes of weights that are in memory at once while a random model is written


@dataclass
class Subject:
    """What is measured: our engine and, unless left out, transformers; how long each took to load, in seconds."""

    name: str
    engine: Engine
    load: float
    rival: Rival | None = None
    rival_load: float = 0.0

    @property
    def config(self) -> ModelConfig:
        return self.engine.config

    def facts(self) -> dict:
        parameters = sum(math.prod(shape) for shape in expected_shapes(self.config).values())
        loads = {"minips": self.load, **({"transformers": self.rival_load} if self.rival is not None else {})}
        return {"name": self.name, "parameters": parameters, "dtype": str(self.engine.dtype).removeprefix("torch."), "load_s": loads}


class Ids:
    """Fresh random prompts: no two are the same."""

    def __init__(self, vocab: int, seed: int = 0):
        self._random, self._vocab = random.Random(seed), vocab

    def __call__(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab) for _ in range(count)]


class Rival:
    """transformers' model of a folder, as its users run it: `AutoModelForCausalLM`, SDPA attention, its own cache."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device):
        try:
            import transformers
        except ImportError:
            raise MinipsError("transformers is not installed, and is the rival here; pip install transformers, or --no-rival") from None
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        self.device = device

    @torch.no_grad()
    def first_token(self, ids: list[int]) -> float:
        """Seconds from token ids to the first new token's id on the host: one prefill, logits of the last position only."""
        started = time.perf_counter()
        output = self.model(torch.tensor([ids], device=self.device), use_cache=True, logits_to_keep=1)
        int(output.logits[0, -1].argmax())
        return time.perf_counter() - started

    @torch.no_grad()
    def generate(self, rows: Sequence[list[int]], tokens: int) -> tuple[list[float], list[list[int]]]:
        """Greedy new tokens of equally long prompts as one batch -> (when the logits of each step were there, ids)."""
        import transformers

        stamps: list[float] = []

        def stamp(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if scores.is_cuda:
                torch.cuda.synchronize(scores.device)
            stamps.append(time.perf_counter())
            return scores

        ids = torch.tensor(rows, device=self.device)
        processors = transformers.LogitsProcessorList([stamp])
        exact = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        made = self.model.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=processors, **exact)
        return stamps, made[:, ids.shape[1] :].tolist()


# Branches and synthesizers


def branch_context(j: int) -> int:
    """Tokens of c_br of worker j: all differ, so that every branch has to be re-rotated."""
    return 5 + j


def mapper_of(config: ModelConfig, kind: str) -> CacheMapper | None:
    """A mapper that changes something: one that is the identity would be skipped. normalize has no parameters."""
    if kind == "none":
        return None
    mapper = new_mapper(MapperConfig(kind), config).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in mapper.parameters():
        parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return mapper


def synthesizer_of(subject: Subject, kind: str, profile: str) -> Synthesizer:
    adapter = Adapter(f"bench {kind}", mapper_of(subject.config, kind), None, MergeOptions(profile=profile))
    return Synthesizer(subject.engine, adapter)


def save_workers(subject: Subject, ids: Ids, m: int, length: int, folder: Path) -> list[int]:
    """Write m branches with `length` output tokens each, to be loaded afresh for every call -> ids of prefix and outputs."""
    engine, prefix = subject.engine, ids(PREFIX)
    outputs = [ids(length) for _ in range(m)]
    with engine.prefill(prefix) as root:
        branches = engine.fork(root, [ids(branch_context(j)) for j in range(m)])
        try:
            engine.encode(branches, outputs)
            engine.save_branches(branches, folder)
        finally:
            for branch in branches:
                branch.close()
    return prefix + [token for output in outputs for token in output]


# Loading


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `open_subject` reads."""
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, folder or hub id (default: %(default)s)")
    parser.add_argument("--random", choices=SHAPES, help="random weights of this size instead, made here and thrown away")
    parser.add_argument("--max-positions", type=int, metavar="N", help="position limit of the random model (default: its family's own)")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights, of both rivals (default: %(default)s)")
    parser.add_argument("--kv-dtype", default="auto", help="of our KV cache (default: as the weights)")
    parser.add_argument("--quantize", choices=("int8", "int4"), help="of our weights; the rival stays as it is")
    parser.add_argument("--compile", action="store_true", help="our layers compiled; the rival stays eager")
    parser.add_argument("--no-rival", action="store_true", help="leave transformers out")


@contextmanager
def open_subject(args: argparse.Namespace, kv_tokens: int) -> Iterator[Subject]:
    """Load what the arguments ask for, with room for `kv_tokens` cached tokens; random models are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="minips-bench-") as place:
        if args.random is None and args.max_positions is not None:
            raise MinipsError("--max-positions is for --random; a real model's limit is its own")
        folder, title = (resolve_model(args.model, progress=True), args.model) if args.random is None else _random_folder(args, Path(place))
        own = {key: value for key, value in (("quantize", args.quantize), ("compile", args.compile)) if value}
        for name in own.keys() - inspect.signature(Engine.from_pretrained).parameters:
            raise MinipsError(f"--{name}: this version's engine has no such setting")
        started = time.perf_counter()
        engine = Engine.from_pretrained(folder, dtype=args.dtype, kv_dtype=args.kv_dtype, max_kv_tokens=kv_tokens, **own)
        subject = Subject(title, engine, time.perf_counter() - started)
        if not args.no_rival:
            started = time.perf_counter()
            subject.rival = Rival(folder, engine.dtype, engine.device)
            subject.rival_load = time.perf_counter() - started
        say(f"{title}: loaded in {subject.load:.1f} s" + (f", transformers in {subject.rival_load:.1f} s" if subject.rival else ""))
        try:
            yield subject
        finally:
            engine.close()


def _random_folder(args: argparse.Namespace, folder: Path) -> tuple[Path, str]:
    data = {**SHAPES[args.random], **({} if args.max_positions is None else {"max_position_embeddings": args.max_positions})}
    config = ModelConfig.from_dict(data, f"--random {args.random}")
    size = 2 * sum(math.prod(shape) for shape in expected_shapes(config).values())
    check_room(f"--random {args.random}", size, copies=1 if args.no_rival else 2, folder=folder)
    write_random_model(folder, data, config)
    limit = "" if args.max_positions is None else f", {args.max_positions} positions"
    return folder, f"random {args.random}{limit}"


def check_room(what: str, size: int, *, copies: int, folder: Path) -> None:
    """Refuse weights of `size` bytes, loaded `copies` times and written once, where memory or disk have no room for them."""
    wanted = size * copies + min(size, SHARD)
    for kind, free, needed in (("memory", free_memory(), wanted), ("disk space", shutil.disk_usage(folder).free, size)):
        if needed > free:
            hint = "; --no-rival halves it" if kind == "memory" and copies > 1 else ""
            raise MinipsError(f"{what} needs {needed / 1e9:.1f} GB of {kind}, {free / 1e9:.1f} GB are free{hint}")


def free_memory() -> float:
    """Bytes that can still be taken; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return math.inf
    try:  # a container may have less
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):
        return free


def write_random_model(folder: Path, data: dict, config: ModelConfig) -> None:
    """config.json and seeded bf16 weights in shards; norms are 1."""
    (folder / "config.json").write_text(json.dumps(data))
    generator, shards, size = torch.Generator().manual_seed(0), [[]], 0
    for name, shape in expected_shapes(config).items():
        if size and size + 2 * math.prod(shape) > SHARD:
            shards.append([])
            size = 0
        shards[-1].append((name, shape))
        size += 2 * math.prod(shape)
    weight_map, total = {}, 0
    for number, part in enumerate(shards, 1):
        tensors = {}
        for name, shape in part:
            tensor = torch.empty(shape, dtype=torch.bfloat16)
            tensors[name] = tensor.fill_(1) if name.endswith("norm.weight") else tensor.uniform_(-0.03, 0.03, generator=generator)
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
