"""A slow, obvious reference: dense float64 Llama/Qwen with explicit positions and explicit past, no cache tricks.

Keys are kept unrotated and rotated at the position where they are read, so re-rotation has nothing to hide behind.
"""

from __future__ import annotations

import math

import torch

F64 = torch.float64


class Reference:
    """tensors: Hugging Face names; every product in float64."""

    def __init__(self, tensors: dict[str, torch.Tensor], config):
        self.config = config
        self.tensors = {name: tensor.to(F64) for name, tensor in tensors.items()}
        rope = config.rope
        freqs = []
        for i in range(config.head_dim // 2):
            freq = 1.0 / rope.theta ** (2 * i / config.head_dim)
            if rope.type == "llama3":
                wavelength = 2 * math.pi / freq
                low = rope.original_max_position_embeddings / rope.low_freq_factor
                high = rope.original_max_position_embeddings / rope.high_freq_factor
                if wavelength > low:
                    freq /= rope.factor
                elif wavelength > high:
                    smooth = (rope.original_max_position_embeddings / wavelength - rope.low_freq_factor) / (
                        rope.high_freq_factor - rope.low_freq_factor
                    )
                    freq = (1 - smooth) * freq / rope.factor + smooth * freq
            freqs.append(freq)
        self.freqs = torch.tensor(freqs, dtype=F64)

    def rotate(self, x, positions):
        """x [T, heads, head_dim] at integer positions [T]."""
        out = torch.empty_like(x)
        half = x.shape[-1] // 2
        for t, position in enumerate(positions):
            for i in range(half):
                angle = float(position) * float(self.freqs[i])
                a, b = x[t, :, i], x[t, :, i + half]
                out[t, :, i] = a * math.cos(angle) - b * math.sin(angle)
                out[t, :, i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def norm(self, x, weight):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.rms_norm_eps) * weight

    def linear(self, x, name):
        out = x @ self.tensors[name + ".weight"].T
        return out + self.tensors[name + ".bias"] if name + ".bias" in self.tensors else out

    def forward(self, ids, positions, past=None, past_positions=()):
        """Run ids at positions behind `past` (per layer unrotated K, V) -> logits [T, vocab], per-layer (unrotated K, V)."""
        c = self.config
        x = self.tensors["model.embed_tokens.weight"][torch.tensor(ids)]
        new = []
        total = len(past_positions) + len(ids)
        for layer in range(c.num_hidden_layers):
            name = f"model.layers.{layer}."
            h = self.norm(x, self.tensors[name + "input_layernorm.weight"])
            q, k, v = (self.linear(h, f"{name}self_attn.{p}_proj").unflatten(-1, (-1, c.head_dim)) for p in "qkv")
            if c.qk_norm:
                q = self.norm(q, self.tensors[name + "self_attn.q_norm.weight"])
                k = self.norm(k, self.tensors[name + "self_attn.k_norm.weight"])
            new.append((k, v))
            keys, values = (k, v) if past is None else (torch.cat((past[layer][0], k)), torch.cat((past[layer][1], v)))
            keys = self.rotate(keys, [*past_positions, *positions])
            q = self.rotate(q, positions)
            out = torch.zeros_like(q)
            group = c.num_attention_heads // c.num_key_value_heads
            for t in range(len(ids)):
                seen = total - len(ids) + t + 1
                for head in range(c.num_attention_heads):
                    scores = keys[:seen, head // group] @ q[t, head] / math.sqrt(c.head_dim)
                    out[t, head] = torch.softmax(scores, 0) @ values[:seen, head // group]
            x = x + self.linear(out.flatten(1), name + "self_attn.o_proj")
            h = self.norm(x, self.tensors[name + "post_attention_layernorm.weight"])
            gate = self.linear(h, name + "mlp.gate_proj")
            x = x + self.linear(gate * torch.sigmoid(gate) * self.linear(h, name + "mlp.up_proj"), name + "mlp.down_proj")
        x = self.norm(x, self.tensors["model.norm.weight"])
        head = "model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"
        return x @ self.tensors[head].T, new

    def plain(self, ids):
        """Logits of one ordinary sequence."""
        return self.forward(ids, range(len(ids)))[0]

    def greedy(self, ids, count):
        """`count` greedy tokens behind ids, each by a whole forward pass."""
        ids = list(ids)
        for _ in range(count):
            ids.append(int(self.plain(ids)[-1].argmax()))
        return ids[-count:]

    def merged(self, prefix, branches, u, *, keep_prefix=True, starts=None, offset=None):
        """Logits of u over merged branches. branches: (c_br ids, z ids); z of branch j stands from position starts[j] on."""
        kept_k = [[] for _ in range(self.config.num_hidden_layers)]
        kept_v = [[] for _ in range(self.config.num_hidden_layers)]
        positions = []
        n = len(prefix)
        starts = [n] * len(branches) if starts is None else starts

        def keep(cache, first, last, start):
            for layer, (k, v) in enumerate(cache):
                kept_k[layer].append(k[first:last])
                kept_v[layer].append(v[first:last])
            positions.extend(range(start, start + last - first))

        if keep_prefix:
            keep(self.forward(prefix, range(n))[1], 0, n, 0)
        for (own, z), start in zip(branches, starts):
            ids = [*prefix, *own, *z]
            keep(self.forward(ids, range(len(ids)))[1], len(ids) - len(z), len(ids), start)
        if offset is None:
            offset = max(start + len(z) for (_, z), start in zip(branches, starts))
        past = [(torch.cat(k), torch.cat(v)) for k, v in zip(kept_k, kept_v)]
        return self.forward(u, range(offset, offset + len(u)), past, positions)[0]
