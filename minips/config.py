"""Settings as frozen dataclasses: model, RoPE, engine, sampling, merge options. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from .errors import MinipsError, brief, in_one_line, refuse_unknown
from .reading import is_integer, read_json

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DEFAULT_MODEL = "smollm2-135m"  # SmolLM2-135M-Instruct, fetched on first use
ROPE_TYPES = ("default", "llama3")
_SCALING_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "long_factor", "short_factor", "mrope_section")
GREEDY_EPSILON = 1e-5  # temperatures below this are greedy
MAX_LAYERS = 4096  # names of tensors are listed before files are looked at


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `theta` is the base; `type` default or llama3 (the scaling of the Llama 3.1 model card)."""

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """The fields of a Hugging Face config.json that change the maths, checked and with defaults filled in."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeConfig
    attention_bias: bool = False  # q, k and v projections carry a bias (Qwen2)
    output_bias: bool = False  # the o projection carries one too (Llama's attention_bias)
    qk_norm: bool = False  # RMSNorm per head on q and k before RoPE (Qwen3)
    dtype: str = "float32"  # of the stored weights
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @classmethod
    def from_dict(cls, data: dict, name: str = "config.json") -> ModelConfig:
        """Build from a parsed config.json. `name` stands in error messages. Refuses what it does not implement."""
        return _ConfigReader(data, name).model()

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read `folder`/config.json (Hugging Face layout)."""
        path = Path(folder) / "config.json"
        return cls.from_dict(read_json(path), str(path))


class _ConfigReader:
    """Typed access to one config.json; every failure names the file, the field, and what was found."""

    def __init__(self, data: dict, name: str):
        self.data, self.name = data, name

    def fail(self, message: str) -> MinipsError:
        return MinipsError(f"{self.name}: {message}")

    def integer(self, key: str, default: int | None = None, limit: int = 2**31 - 1) -> int:
        value = self.data.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(f"field {key!r} is missing")
        if not is_integer(value) or not 0 < value <= limit:
            raise self.fail(f"{key} is {brief(value)}, expected a positive integer up to {limit}")
        return value

    def number(self, data: dict, key: str, default: float | None = None) -> float:
        value = data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
            raise self.fail(f"{key} is {brief(value)}, expected a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(f"{key} is {brief(value)}, expected true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.data.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(is_integer(i) and i >= 0 for i in ids):
            raise self.fail(f"{key} is {brief(value)}, expected a token id or a list of them")
        return tuple(ids)

    def family(self) -> str:
        found = self.data.get("architectures") or []
        if not isinstance(found, list):
            raise self.fail(f"architectures is {brief(found)}, expected a list")
        model_type = self.data.get("model_type")
        supported = ", ".join(f"{arch} ({kind})" for kind, arch in ARCHITECTURES.items())
        for kind, architecture in ARCHITECTURES.items():
            if model_type in (kind, None) and architecture in found or model_type == kind and not found:
                return kind
        label = in_one_line(", ".join(map(str, found)))[:300] or "no architecture"
        raise self.fail(f"found {label} with model_type {brief(model_type)}; supported: {supported}")

    def rope(self, model_type: str) -> RopeConfig:
        block = self.data.get("rope_parameters")  # the spelling of transformers 5: theta inside the block
        scaling = self.data.get("rope_scaling") if block is None else block
        if block is not None and self.data.get("rope_scaling") not in (None, block):
            raise self.fail("rope_parameters and rope_scaling disagree, expected one of them")
        scaling = {} if scaling is None else scaling
        if not isinstance(scaling, dict):
            raise self.fail(f"rope_scaling is {brief(scaling)}, expected an object or null")
        source = scaling if "rope_theta" in scaling else self.data
        theta = self.number(source, "rope_theta", 10000.0)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if "type" in scaling and scaling["type"] != kind:
            raise self.fail(f"rope_scaling has type {brief(scaling['type'])} and rope_type {brief(kind)}, expected one name")
        if kind not in ROPE_TYPES:
            raise self.fail(f"rope scaling type {brief(kind)} is not supported; supported: {', '.join(ROPE_TYPES)}")
        if self.number(scaling, "partial_rotary_factor", 1.0) != 1.0 or self.data.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise self.fail("partial_rotary_factor other than 1 is not supported")
        if kind == "default":
            if unused := sorted(key for key in _SCALING_FIELDS if scaling.get(key) not in (None, 1)):
                raise self.fail(f"rope_scaling has {', '.join(unused)} but no scaling type; supported: {', '.join(ROPE_TYPES)}")
            return RopeConfig(theta=theta)
        original = scaling.get("original_max_position_embeddings")
        if not is_integer(original) or original <= 0:
            raise self.fail(f"rope_scaling.original_max_position_embeddings is {brief(original)}, expected a positive integer")
        factors = [self.number(scaling, name) for name in ("factor", "low_freq_factor", "high_freq_factor")]
        rope = RopeConfig(theta, kind, *factors, original)
        if rope.high_freq_factor <= rope.low_freq_factor:
            raise self.fail(f"rope_scaling high_freq_factor {rope.high_freq_factor} must exceed low_freq_factor {rope.low_freq_factor}")
        return rope

    def refuse_unsupported(self) -> None:
        if self.data.get("use_sliding_window") or (
            self.data.get("sliding_window") is not None and self.data.get("use_sliding_window") is not False
        ):
            raise self.fail(f"sliding_window {brief(self.data.get('sliding_window'))} is active and not supported")
        layer_types = self.data.get("layer_types") or []
        if not isinstance(layer_types, list):
            raise self.fail(f"layer_types is {brief(layer_types)}, expected a list")
        if any(kind != "full_attention" for kind in layer_types):
            raise self.fail(f"layer_types {brief(layer_types)} found, only full_attention is supported")
        if self.data.get("hidden_act", "silu") != "silu":
            raise self.fail(f"hidden_act {brief(self.data['hidden_act'])} is not supported; supported: silu")
        if self.data.get("mlp_bias"):
            raise self.fail("mlp_bias true is not supported")
        if self.data.get("quantization_config"):
            raise self.fail("quantization_config found; only unquantised weights are supported")
        if self.data.get("pretraining_tp", 1) not in (None, 1):
            raise self.fail(f"pretraining_tp {brief(self.data['pretraining_tp'])} is not supported; supported: 1")

    def model(self) -> ModelConfig:
        model_type = self.family()
        self.refuse_unsupported()
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self.fail(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        head_dim = self.data.get("head_dim")
        if head_dim is None and model_type == "qwen3":
            head_dim = 128  # the family's own default
        if head_dim is None:
            if hidden % heads:
                raise self.fail(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads} and head_dim is not given")
            head_dim = hidden // heads
        if not is_integer(head_dim) or head_dim <= 0 or head_dim % 2:
            raise self.fail(f"head_dim is {brief(head_dim)}, expected a positive even integer")
        dtype = self.data.get("dtype") or self.data.get("torch_dtype") or "float32"
        if dtype not in ("float32", "bfloat16", "float16"):
            raise self.fail(f"dtype is {brief(dtype)}, expected float32, bfloat16 or float16")
        bos = self.token_ids("bos_token_id")
        declared_bias = self.flag("attention_bias", False)
        return ModelConfig(
            model_type=model_type,
            vocab_size=self.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self.integer("intermediate_size"),
            num_hidden_layers=self.integer("num_hidden_layers", limit=MAX_LAYERS),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self.number(self.data, "rms_norm_eps", 1e-6),
            max_position_embeddings=self.integer("max_position_embeddings", 2048 if model_type == "llama" else 32768),
            tie_word_embeddings=self.flag("tie_word_embeddings", False),
            rope=self.rope(model_type),
            attention_bias=declared_bias or model_type == "qwen2",
            output_bias=declared_bias and model_type != "qwen2",
            qk_norm=model_type == "qwen3",
            dtype=dtype,
            eos_token_ids=self.token_ids("eos_token_id"),
            bos_token_id=bos[0] if bos else None,
        )


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. The filters apply in this order: repetition penalty, temperature, top_k, top_p, min_p.

    temperature below 1e-5 is greedy; top_k 0 and top_p 1 are off; `min_p` is relative to the largest probability.
    `seed` None draws a fresh one. One object for several rows: row i draws from the stream (seed, i).
    `logprobs` k > 0 reports the chosen token and the k likeliest, from the raw logits. `return_logits` keeps fp32 logits.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0
    return_logits: bool = False

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            value = () if value is None else (value,) if isinstance(value, (str, int)) else value
            object.__setattr__(self, name, tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else (value,))
        object.__setattr__(self, "top_k", 0 if self.top_k is None else self.top_k)
        checks = (
            ("max_tokens", is_integer(self.max_tokens) and self.max_tokens >= 1, "an integer of at least 1"),
            ("temperature", _between(self.temperature, 0, 1e6), "a number from 0 to 1000000"),
            ("top_k", is_integer(self.top_k) and self.top_k >= 0, "an integer of at least 0 (0 switches it off)"),
            ("top_p", _between(self.top_p, 0, 1), "a number from 0 to 1"),
            ("min_p", _between(self.min_p, 0, 1), "a number from 0 to 1"),
            ("repetition_penalty", _between(self.repetition_penalty, 1e-6, 1e6), "a number from 0.000001 to 1000000"),
            ("seed", self.seed is None or is_integer(self.seed) and 0 <= self.seed < 2**63, "an integer from 0 to 2**63 - 1"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "strings that are not empty"),
            ("stop_token_ids", all(is_integer(i) and i >= 0 for i in self.stop_token_ids), "token ids"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "true or false"),
            ("logprobs", is_integer(self.logprobs) and 0 <= self.logprobs <= 1000, "an integer from 0 to 1000"),
            ("return_logits", isinstance(self.return_logits, bool), "true or false"),
        )
        _check("SamplingParams", self, checks)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON


def _between(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _check(kind: str, obj: object, checks: tuple) -> None:
    for name, good, expected in checks:
        if not good:
            raise MinipsError(f"{kind}: {name} is {brief(getattr(obj, name))}, expected {expected}")


PROFILES = ("minips", "official")
ANCHORS = ("fork", "zero", "free")
LAYOUTS = ("parallel", "sequential")
KEEP_TURNS = ("final", "outputs", "compact", "all", "full")


@dataclass(frozen=True)
class MergeOptions:
    """How branches become one context (CONTRACT.md sections 4 and 5). None takes the profile's default.

    profile: minips, or official for the released code's kept tokens and positions. keep_prefix: the synthesizer sees c_sh.
    anchor: position of a branch's first kept token: fork (the length of c_sh), zero, or free (leaves most branches unrotated).
    layout: parallel (all start at the anchor) or sequential (end to end). rerotate False is the naive baseline.
    branch_temperature and branch_scale other than 1 weigh the branches in the attention (`attention.Reweight`).
    """

    profile: str = "minips"
    keep_prefix: bool | None = None
    anchor: str | None = None
    layout: str = "parallel"
    keep_turns: str = "final"
    keep_stop_token: bool = False
    rerotate: bool = True
    branch_temperature: float = 1.0
    branch_scale: float = 1.0

    def __post_init__(self) -> None:
        official = self.profile == "official"
        if self.keep_prefix is None:
            object.__setattr__(self, "keep_prefix", not official)
        if self.anchor is None:
            object.__setattr__(self, "anchor", "fork" if self.keep_prefix else "zero" if official else "free")
        checks = (
            ("profile", self.profile in PROFILES, f"one of {', '.join(PROFILES)}"),
            ("keep_prefix", isinstance(self.keep_prefix, bool), "true or false"),
            ("anchor", self.anchor in ANCHORS, f"one of {', '.join(ANCHORS)}"),
            ("layout", self.layout in LAYOUTS, f"one of {', '.join(LAYOUTS)}"),
            ("keep_turns", self.keep_turns in KEEP_TURNS, f"one of {', '.join(KEEP_TURNS)}"),
            ("keep_stop_token", isinstance(self.keep_stop_token, bool), "true or false"),
            ("rerotate", isinstance(self.rerotate, bool), "true or false"),
            ("branch_temperature", _between(self.branch_temperature, 0.01, 100), "a number from 0.01 to 100"),
            ("branch_scale", _between(self.branch_scale, 0, 100), "a number from 0 to 100"),
        )
        _check("MergeOptions", self, checks)
        if self.keep_prefix and self.keep_turns == "full":
            raise MinipsError("MergeOptions: keep_turns 'full' holds each branch's prefix and cannot be combined with keep_prefix=True")
        if self.keep_prefix and self.anchor != "fork":
            raise MinipsError(
                f"MergeOptions: anchor {self.anchor!r} cannot be combined with keep_prefix=True, "
                "because branches would overlap the kept prefix; use anchor='fork' or keep_prefix=False"
            )

    @classmethod
    def from_dict(cls, data: dict) -> MergeOptions:
        """Options by name; unknown names are refused."""
        refuse_unknown(data, [field.name for field in fields(cls)], "MergeOptions", "option")
        return cls(**data)

    def changed(self, data: dict) -> MergeOptions:
        """These options with others put over them. Another profile or keep_prefix brings its own defaults along."""
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        if data.get("profile", self.profile) != self.profile:
            del kept["keep_prefix"], kept["anchor"]
        elif data.get("keep_prefix", self.keep_prefix) != self.keep_prefix:
            del kept["anchor"]
        return MergeOptions.from_dict({**kept, **data})


@dataclass(frozen=True)
class EngineConfig:
    """Engine settings. `max_kv_tokens` None sizes the pool from free memory; sizes are in tokens.

    kv_dtype: auto, a float dtype, int8 or fp8. max_device_kv_bytes: so large is the pool instead, and what running calls do not
    need can be parked in host memory.
    """

    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    page_size: int = 16
    max_kv_tokens: int | None = None
    prefill_chunk: int = 4096
    debug: bool = False  # name the first layer with NaN or infinite values; slow
    quantize: str = "none"
    max_device_kv_bytes: int | None = None

    def __post_init__(self) -> None:
        size, most = self.max_kv_tokens, self.max_device_kv_bytes
        checks = (
            ("page_size", is_integer(self.page_size) and 1 <= self.page_size <= 4096, "an integer from 1 to 4096"),
            ("max_kv_tokens", size is None or is_integer(size) and size > 0, "a positive integer"),
            ("max_device_kv_bytes", most is None or is_integer(most) and most > 0, "a positive integer"),
            ("max_device_kv_bytes", most is None or size is None, "no value beside max_kv_tokens: both size the pool"),
            ("prefill_chunk", is_integer(self.prefill_chunk) and self.prefill_chunk > 0, "a positive integer"),
            ("quantize", self.quantize in ("none", "int8", "int4"), "none, int8 or int4"),
        )
        _check("EngineConfig", self, checks)
