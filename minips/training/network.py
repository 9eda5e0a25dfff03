"""What is trained: a cache mapper, and LoRA layers in a second module tree on the frozen base's tensors (copies of packed ones)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from ..adapter import Adapter
from ..engine import Engine
from ..errors import MinipsError
from ..lora import TARGETS, LoraAdapter, LoRALinear
from ..mapper import CacheMapper, MapperConfig
from ..model import Model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class Network:
    """`model`: the base with LoRA layers around its targets (none where rank is 0); `mapper`: None for the kind none.

    The base stays as it is for the workers; only LoRA and mapper tensors, in fp32, ask for gradients.
    """

    def __init__(self, engine: Engine, mapper: MapperConfig, *, rank: int = 16, alpha: float = 32.0, targets: Sequence[str] = ATTENTION):
        for name in targets:
            if name not in TARGETS:
                raise MinipsError(f"targets has {name!r}, expected some of {', '.join(TARGETS)}")
        self.engine, self.rank, self.alpha, self.targets = engine, rank, alpha, tuple(targets)
        self.model = Model.from_tensors(engine.config, _tensors(engine.model))
        if rank:
            for parent in list(self.model.modules()):
                for name, child in list(parent.named_children()):
                    if name in targets and isinstance(child, nn.Linear):
                        setattr(parent, name, LoRALinear(child, rank, alpha))
                        parent.fused = None  # its layers no longer are rows of one matrix
        config = engine.config
        self.mapper = None
        if mapper.kind != "none":
            self.mapper = CacheMapper(mapper, config.num_hidden_layers, config.num_key_value_heads, config.head_dim).to(engine.device)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name -> tensor, `mapper.` and `lora.` before Hugging Face's module names."""
        found = {f"mapper.{name}": tensor for name, tensor in self.mapper.named_parameters()} if self.mapper is not None else {}
        for name, module in self._lora():
            found |= {f"lora.{name}.lora_A": module.lora_A, f"lora.{name}.lora_B": module.lora_B}
        return found

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """Base tensors, which must never get a gradient."""
        ours = {id(tensor) for tensor in self.trainable().values()}
        yield from ((name, tensor) for name, tensor in self.model.named_parameters() if id(tensor) not in ours)

    def adapter(self, name: str = "trained") -> LoraAdapter | None:
        """The LoRA in its present state, as `adapter.save_adapter` writes it."""
        if not self.rank:
            return None
        pairs = {n: (m.lora_A.detach().cpu().clone(), m.lora_B.detach().cpu().clone(), m.scale) for n, m in self._lora()}
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.targets),
        }
        config |= {"lora_dropout": 0.0, "bias": "none", "use_rslora": False, "inference_mode": True}
        return LoraAdapter(name, pairs, config)

    def start_from(self, adapter: Adapter) -> None:
        """Take over an adapter's values. MinipsError where its mapper or LoRA is of another form than this one's."""
        ours, theirs = self.trainable(), {}
        for name, (a, b, scale) in (adapter.lora.pairs if adapter.lora is not None else {}).items():
            theirs |= {f"lora.{name}.lora_A": a, f"lora.{name}.lora_B": b * (scale * self.rank / self.alpha if self.rank else 1.0)}
        if adapter.mapper is not None:
            theirs |= {f"mapper.{name}": tensor for name, tensor in adapter.mapper.named_parameters()}
        wrong = sorted(set(ours) ^ set(theirs)) or [name for name in ours if ours[name].shape != theirs[name].shape]
        if wrong:
            raise MinipsError(f"start: {adapter.name} has another mapper or LoRA than this run trains ({', '.join(wrong[:3])})")
        for name, tensor in ours.items():
            tensor.data.copy_(theirs[name])

    def _lora(self) -> Iterator[tuple[str, LoRALinear]]:
        return ((name, module) for name, module in self.model.named_modules() if isinstance(module, LoRALinear))


def _tensors(model: Model) -> dict[str, Tensor]:
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors
