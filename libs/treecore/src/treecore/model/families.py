"""The model families, each a declaration: what its fields mean, what its tensors are called, which parts it has.

A family that is not here, and a field's value that changes the model and is not declared, are refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from treecore.errors import ConfigError
from treecore.model.config import (
    Config,
    nested,
    positive,
    positive_int,
    positive_or_none,
    read_json,
    refuse_others,
    token_ids,
)
from treecore.model.spec import (
    Activation,
    DraftSpec,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    NormSpec,
    RopeSpec,
    Tensors,
)

MAX_LAYERS = 10_000
MAX_CONTEXT_LEN = 2**22  # the rotation of every position is tabulated at load
DRAFT_KEYS = {"teacher_embedding", "head_token_ids", "teacher"}
NULL_MEANS_NONE = {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}  # not the default
NOT_EVERYONES = ("sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """How one `model_type` is read.

    layers: from config and number of layers, how each layer knows positions. supported: fields that must be absent or
    have one of these values. defaults: what an absent field means; one of NOT_EVERYONES that is not among them must be
    absent. named: our name of a field that this family calls otherwise. activations: the values of the activation's
    field, and what they are.
    """

    layers: Callable[[Config, int], tuple[LayerSpec, ...]]
    tensors: Tensors
    supported: Mapping[str, tuple[Any, ...]]
    defaults: Config
    named: Mapping[str, str] = field(default_factory=dict)
    activations: Mapping[str, Activation] = field(default_factory=lambda: {"silu": "silu"})
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    scales_embedding: bool = False

    def name(self, name: str) -> str:
        """What the family calls the field `name`."""
        return self.named.get(name, name)


def read_spec(path: Path) -> ModelSpec:
    """The spec of the checkpoint directory `path`. Raises ConfigError naming the file or the field that is at fault."""
    config = dict(read_json(path / "config.json"))
    generation = path / "generation_config.json"
    if generation.exists():  # generate() lets it override config.json, and so do we
        overrides = read_json(generation)
        config.update(
            {key: overrides[key] for key in ("bos_token_id", "eos_token_id") if overrides.get(key) is not None}
        )
    return parse_spec(config, name=path.resolve().name)


def parse_spec(config: Config, name: str) -> ModelSpec:
    """The spec that a config.json object states. Raises ConfigError naming an absent, malformed or unsupported one."""
    family = _family(config)
    config = _completed(config, family)
    num_heads, hidden_size = (positive_int(config, key) for key in ("num_attention_heads", "hidden_size"))
    num_layers = positive_int(config, "num_hidden_layers", most=MAX_LAYERS)
    head_dim = positive_int(config, "head_dim", hidden_size // num_heads)
    spec = ModelSpec(
        name=name,
        family=config["model_type"],
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive_int(config, family.name("intermediate_size")),
        num_heads=num_heads,
        num_kv_heads=positive_int(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        layers=family.layers(config, num_layers),
        norm=NormSpec(family.norm, positive(config, "rms_norm_eps"), family.norm_offset),
        activation=_activation(family, config),
        attention_scale=positive(config, "query_pre_attn_scalar", head_dim) ** -0.5,
        tensors=family.tensors,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        context_len=positive_int(config, "max_position_embeddings", most=MAX_CONTEXT_LEN),
        bos_token_id=next(iter(token_ids(config, "bos_token_id")), None),
        eos_token_ids=token_ids(config, "eos_token_id"),
        embedding_scale=hidden_size**0.5 if family.scales_embedding else 1.0,
        attention_soft_cap=positive_or_none(config, "attn_logit_softcapping"),
        logit_soft_cap=positive_or_none(config, "final_logit_softcapping"),
        draft=_draft(config.get("espalier")),
    )
    _check(spec, config)
    return spec


def _family(config: Config) -> Family:
    family = FAMILIES.get(kind) if isinstance(kind := config.get("model_type"), str) else None
    if family is None:
        raise ConfigError(f"config.json: model_type={kind!r} is not supported (only {', '.join(FAMILIES)})")
    return family


def _completed(config: Config, family: Family) -> Config:
    """`config` with what absent fields mean. Raises ConfigError for a field or value that the family does not have."""
    unknown = dict.fromkeys((key for key in NOT_EVERYONES if key not in family.defaults), (None,))
    everyones = {"quantization_config": (None,), "partial_rotary_factor": (1,), "tie_word_embeddings": (False, True)}
    refuse_others(config, {**everyones, **unknown, **family.supported})
    stated = {key: value for key, value in config.items() if value is not None or key in NULL_MEANS_NONE}
    return {**family.defaults, **stated}


def _activation(family: Family, config: Config) -> Activation:
    name = family.name("hidden_act")
    refuse_others(config, {name: tuple(family.activations)})
    return family.activations[config.get(name) or next(iter(family.activations))]


def _check(spec: ModelSpec, config: Config) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigError(
            f"config.json: num_key_value_heads={spec.num_kv_heads} does not divide {spec.num_heads} heads"
        )
    if beyond := [token for token in spec.eos_token_ids if token >= spec.vocab_size]:
        raise ConfigError(f"config.json: eos_token_id={beyond[0]} is none of vocab_size={spec.vocab_size} tokens")
    if spec.head_dim % 2 and any(layer.rope for layer in spec.layers):
        raise ConfigError(f"config.json: head_dim={spec.head_dim} is odd; rotary embedding needs pairs")
    if config.get("word_embed_proj_dim", spec.hidden_size) not in (None, spec.hidden_size):
        raise ConfigError(
            f"config.json: word_embed_proj_dim={config['word_embed_proj_dim']!r} is not supported "
            f"(expected hidden_size, {spec.hidden_size})"
        )


def _draft(value: object) -> DraftSpec | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json: espalier={value!r} is no object")
    if unknown := set(value) - DRAFT_KEYS:
        raise ConfigError(f"config.json: espalier has unknown fields {sorted(unknown)}")
    teacher_embedding = bool(value.get("teacher_embedding", False))
    return DraftSpec(teacher_embedding, bool(value.get("head_token_ids", teacher_embedding)))


# Rotary embedding


def _rope(config: Config) -> RopeSpec:
    """Reads both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    stated = [nested(config, field) for field in ("rope_parameters", "rope_scaling") if config.get(field)]
    ropes = {_rope_of({"rope_theta": config.get("rope_theta"), **rope}) for rope in stated or [{}]}
    if len(ropes) > 1:
        raise ConfigError("config.json: rope_parameters and rope_scaling contradict each other; leave out one of them")
    return ropes.pop()


def _rope_of(rope: Config) -> RopeSpec:
    refuse_others(rope, {"partial_rotary_factor": (1,)})
    theta = positive(rope, "rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, LinearScaling(positive(rope, "factor")))
    if kind == "llama3":
        return RopeSpec(theta, _llama3(rope))
    raise ConfigError(f"config.json: rope_type={kind!r} is not supported (default, linear or llama3)")


def _llama3(rope: Config) -> Llama3Scaling:
    low, high = positive(rope, "low_freq_factor"), positive(rope, "high_freq_factor")
    if low >= high:
        raise ConfigError(f"config.json: low_freq_factor={low} must be below high_freq_factor={high}")
    original = positive_int(rope, "original_max_position_embeddings")
    return Llama3Scaling(positive(rope, "factor"), low, high, original)


# Positions of each layer


def _all_equal(config: Config, num_layers: int) -> tuple[LayerSpec, ...]:
    """One rope, and one window if any."""
    return (LayerSpec(_rope(config), _window(config)),) * num_layers


def _no_rope(_config: Config, num_layers: int) -> tuple[LayerSpec, ...]:
    """Positions are in the embedding."""
    return (LayerSpec(None),) * num_layers


def _qwen(config: Config, num_layers: int) -> tuple[LayerSpec, ...]:
    """A window, if it is in use, for the layers from max_window_layers on."""
    in_use = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
    first = positive_int(config, "max_window_layers", least=0)
    types = [SLIDING if in_use and layer_idx >= first else FULL for layer_idx in range(num_layers)]
    ropes = dict.fromkeys((SLIDING, FULL), _rope(config))
    return _by_type(config, types, ropes)


def _gemma2(config: Config, num_layers: int) -> tuple[LayerSpec, ...]:
    """Every other layer has a window, the first among them."""
    types = [FULL if layer_idx % 2 else SLIDING for layer_idx in range(num_layers)]
    return _by_type(config, types, dict.fromkeys((SLIDING, FULL), _rope(config)))


def _gemma3(config: Config, num_layers: int) -> tuple[LayerSpec, ...]:
    """Every sixth layer sees all and has a rope of its own."""
    pattern = positive_int(config, "sliding_window_pattern")
    types = [SLIDING if (layer_idx + 1) % pattern else FULL for layer_idx in range(num_layers)]
    kinds = nested(config, "rope_parameters")
    wide, near = {**nested(kinds, FULL), **nested(config, "rope_scaling")}, nested(kinds, SLIDING)
    full = _rope_of({"rope_theta": positive(config, "rope_theta"), **wide})
    sliding = _rope_of({"rope_theta": positive(config, "rope_local_base_freq"), **near})
    return _by_type(config, types, {FULL: full, SLIDING: sliding})


def _by_type(config: Config, types: list[str], ropes: Mapping[str, RopeSpec]) -> tuple[LayerSpec, ...]:
    """By `layer_types` where it is given, else by `types`."""
    stated = config.get("layer_types")
    if stated is None:
        stated = types
    if not isinstance(stated, list) or len(stated) != len(types) or any(kind not in (SLIDING, FULL) for kind in stated):
        raise ConfigError(f"config.json: layer_types={stated!r} are not {len(types)} of {SLIDING} and {FULL}")
    windows = {SLIDING: _window(config) if SLIDING in stated else None, FULL: None}
    return tuple(LayerSpec(ropes[kind], windows[kind]) for kind in stated)


def _window(config: Config) -> int | None:
    return None if config.get("sliding_window") is None else positive_int(config, "sliding_window")


# The families

_LLAMA_PARTS = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "attention_out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_GEMMA_PARTS = {
    **_LLAMA_PARTS,
    "attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "down_norm": "post_feedforward_layernorm",
}
_OPT_PARTS = {
    "input_norm": "self_attn_layer_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "attention_out": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "up": "fc1",
    "down": "fc2",
}


def _llama_tensors(parts: Mapping[str, str] = _LLAMA_PARTS, biased: frozenset[str] = frozenset()) -> Tensors:
    return Tensors("model.layers", parts, "model.embed_tokens.weight", "model.norm.weight", biased=biased)


_OPT_TENSORS = Tensors(
    layers="model.decoder.layers",
    parts=_OPT_PARTS,
    embedding="model.decoder.embed_tokens.weight",
    norm="model.decoder.final_layer_norm.weight",
    positions="model.decoder.embed_positions.weight",
    num_unused_positions=2,
    biased=frozenset(_OPT_PARTS),
)
_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_QWEN_DEFAULTS = {
    **_DEFAULTS,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA_DEFAULTS = {
    **_DEFAULTS,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}
_GEMMA_SUPPORTED = {"attention_bias": (False,), "use_bidirectional_attention": (False,)}
_GEMMA_NAMES = {"hidden_act": "hidden_activation"}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        layers=_all_equal,
        tensors=_llama_tensors(),
        supported={"attention_bias": (False,), "mlp_bias": (False,)},
        defaults={**_DEFAULTS, "max_position_embeddings": 2048},
    ),
    "mistral": Family(
        layers=_all_equal,
        tensors=_llama_tensors(),
        supported={"layer_types": (None,)},
        defaults={
            **_DEFAULTS,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "qwen2": Family(
        layers=_qwen,
        tensors=_llama_tensors(biased=frozenset("qkv")),
        supported={},
        defaults=_QWEN_DEFAULTS,
    ),
    "qwen3": Family(
        layers=_qwen,
        tensors=_llama_tensors({**_LLAMA_PARTS, **_HEAD_NORMS}),
        supported={"attention_bias": (False,)},
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    ),
    "gemma2": Family(
        layers=_gemma2,
        tensors=_llama_tensors(_GEMMA_PARTS),
        supported=_GEMMA_SUPPORTED,
        defaults={
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        named=_GEMMA_NAMES,
        activations={"gelu_pytorch_tanh": "gelu_tanh"},
        norm_offset=1.0,
        scales_embedding=True,
    ),
    "gemma3_text": Family(
        layers=_gemma3,
        tensors=_llama_tensors({**_GEMMA_PARTS, **_HEAD_NORMS}),
        supported={**_GEMMA_SUPPORTED, "attn_logit_softcapping": (None,)},
        defaults={
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 131072,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        named=_GEMMA_NAMES,
        activations={"gelu_pytorch_tanh": "gelu_tanh"},
        norm_offset=1.0,
        scales_embedding=True,
    ),
    "opt": Family(
        layers=_no_rope,
        tensors=_OPT_TENSORS,
        supported={
            "do_layer_norm_before": (True,),
            "_remove_final_layer_norm": (False,),
            "enable_bias": (True,),
            "layer_norm_elementwise_affine": (True,),
        },
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 2048},
        named={"hidden_act": "activation_function", "intermediate_size": "ffn_dim"},
        activations={"relu": "relu"},
        norm="layer",
    ),
}
