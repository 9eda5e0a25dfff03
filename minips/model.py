"""The decoder of Llama 3 and what shares its architecture; Qwen2 (q, k, v biases) and Qwen3 (q, k norms) are flags.

Parameter names are Hugging Face's; the rows of q, k and v, and of gate and up, stand in one matrix each, so that one product makes
them. The model knows nothing of the cache: `attend(layer, q, k, v)` is handed in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .errors import MinipsError
from .matrix import Form, Matrix, Packed, Stacked, linear_of, packable, reform, reform_stacked
from .rope import Rope, apply_rope

# glibc learns from the first large block that is freed to keep blocks up to that size (32 MiB at most) instead of giving them back to the
# system: activations of a prefill would else be zeroed by the kernel page by page, each time anew (a norm of 512 rows: 1.6 ms for 0.3).
_KEPT_BY_MALLOC = 31 << 20
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, statistics in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype)


class Attention(nn.Module):
    """`fused` makes q, k and v at once; None: each projection by itself."""

    parts, last = ("q_proj", "k_proj", "v_proj"), "o_proj"

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim, self.heads, self.kv_heads = dim, config.num_attention_heads, config.num_key_value_heads
        self.fused: Matrix | None = None
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=config.output_bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        rows = _at_once(self, x).unflatten(-1, (-1, self.head_dim))
        q, k, v = rows.split((self.heads, self.kv_heads, self.kv_heads), -2)
        if self.q_norm is not None:
            q, k = apply_rope(self.q_norm(q), cos, sin), apply_rope(self.k_norm(k), cos, sin)
        else:
            q, k = apply_rope(rows[:, : -self.kv_heads], cos, sin).split((self.heads, self.kv_heads), -2)
        out = attend(layer, q, k, v).flatten(-2)
        return self.o_proj(out if wanted is None else out[wanted])


class MLP(nn.Module):
    """SwiGLU. `fused` makes gate and up at once."""

    parts, last = ("gate_proj", "up_proj"), "down_proj"

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.fused: Matrix | None = None

    def forward(self, x: Tensor) -> Tensor:
        gate, up = _at_once(self, x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


def _at_once(module: Attention | MLP, x: Tensor) -> Tensor:
    """The outputs of all `parts`, side by side."""
    return module.fused(x) if module.fused is not None else torch.cat([getattr(module, part)(x) for part in module.parts], -1)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        """x [T, hidden_size] -> the same, or its rows `wanted`: all tokens leave K and V, only those go on."""
        attended = self.self_attn(self.input_layernorm(x), cos, sin, layer, attend, wanted)
        x = attended + (x if wanted is None else x[wanted])
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Model(nn.Module):
    """A causal language model over a flat ragged batch of tokens."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head: Matrix | None = None  # in place of lm_head, where that is tied and yet another form of it is faster
        self.rope: Rope | None = None
        self.debug = False  # check every layer's output for NaN and infinities

    @classmethod
    def from_tensors(cls, config: ModelConfig, tensors: dict[str, Tensor]) -> Model:
        """Build around the given tensors (Hugging Face names); a tied head shares the embedding's storage.

        Nothing is copied but q, k, v, gate and up where they do not lie behind each other.
        """
        with torch.device("meta"):
            model = cls(config)
        if config.tie_word_embeddings:
            tensors = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
        model.load_state_dict(tensors, strict=True, assign=True)
        if config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
        model.requires_grad_(False).eval()
        for layer in model.model.layers:
            for module in (layer.self_attn, layer.mlp):
                module.fused = Stacked([getattr(module, part) for part in module.parts])
        model.rope = Rope(config.rope, config.head_dim, model.lm_head.weight.device)
        torch.empty(_KEPT_BY_MALLOC, dtype=torch.uint8)
        return model

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        """input_ids, positions int64 [T] -> hidden states after the last norm, [T, hidden_size].

        wanted: int64 [n], the tokens whose hidden states are asked for (None: all); the last layer computes no more than those.
        """
        cos, sin = self.rope.tables(positions)
        x = self.model.embed_tokens(input_ids)
        last = len(self.model.layers) - 1
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, index, attend, wanted if index == last else None)
            if self.debug and not (finite := torch.isfinite(x).all(-1)).all():
                where = ", ".join(map(str, (~finite).nonzero().flatten().tolist()[:5]))
                raise MinipsError(f"layer {index}: the hidden states are not finite (tokens {where} of {len(x)} in this pass)")
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] -> fp32 [n, vocab_size]. Only for the positions that are needed."""
        return (self.head or self.lm_head)(hidden).float()

    def pack(self) -> None:
        """Where it pays (bf16 on a CPU), put every matrix into the layout that few rows read fastest."""
        if packable(self.model.embed_tokens.weight):
            self.reform(Packed, Packed)

    def reform(self, form: Form, head_form: Form | None) -> None:
        """Put every matrix into another form; the head, without a form for it, stays. A tied one gets it beside the embedding."""
        for layer in self.model.layers:
            for module in (layer.self_attn, layer.mlp):
                reform_stacked(module, form)
                setattr(module, module.last, reform(getattr(module, module.last), form))
        if head_form is None:
            return
        if self.config.tie_word_embeddings:
            self.head = head_form(self.model.embed_tokens.weight.detach(), None)
        else:
            self.lm_head = reform(self.lm_head, head_form)

    def with_weights(self, tensors: dict[str, Tensor]) -> Model:
        """A second model with these weights of linear layers (Hugging Face names) in place of its own; the other modules are the same.

        Where this one's matrices are packed or quantised, the new ones are packed if they can be.
        """
        twins: dict[str, nn.Module] = {"": _twin(self)}
        for name, tensor in tensors.items():
            *path, linear, _ = name.split(".")
            here = ""
            for step in path:
                parent, here = here, f"{here}.{step}"
                if here not in twins:
                    twins[here] = _twin(twins[parent]._modules[step])
                    twins[parent]._modules[step] = twins[here]
            old = getattr(twins[here], linear)
            new = linear_of(tensor, old.bias)
            plain = isinstance(old, nn.Linear) or linear in twins[here].parts or not packable(tensor)
            setattr(twins[here], linear, new if plain else reform(new, Packed))
        for module in twins.values():
            if isinstance(module, (Attention, MLP)):
                was_plain = isinstance(module.fused, Stacked)
                layers = [linear_of(layer.weight, layer.bias) for layer in (getattr(module, part) for part in module.parts)]
                for part, layer in zip(module.parts, layers):
                    setattr(module, part, layer)
                module.fused = Stacked(layers)
                if not was_plain and packable(module.fused.weight):
                    reform_stacked(module, Packed)
        return twins[""]


def _twin(module: nn.Module) -> nn.Module:
    """Another module of the same parts, whose children can be exchanged."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
