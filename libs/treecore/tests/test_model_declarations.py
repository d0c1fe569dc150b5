"""What each family's config.json means, and what of it is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from treecore.errors import ConfigError
from treecore.model.families import FAMILIES, parse_spec
from treecore.model.load import load_decoder
from treecore.model.spec import LayerSpec, LinearScaling, RopeSpec
from treecore.testing.families import write_family

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "num_key_value_heads": 4,
    "head_dim": 6,
}
NEAR, FAR = LayerSpec(RopeSpec(1e4), 4), LayerSpec(RopeSpec(1e6))


def layers(model_type: str, **fields: Any) -> tuple[LayerSpec, ...]:
    """How the layers of such a model know positions."""
    return parse_spec({**SIZES, "model_type": model_type, **fields}, "tiny").layers


def windows(model_type: str, **fields: Any) -> list[int | None]:
    """The window of each layer."""
    return [layer.window for layer in layers(model_type, **fields)]


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("llama", "sliding_window", 4),
        ("llama", "final_logit_softcapping", 30.0),
        ("llama", "tie_word_embeddings", "false"),
        ("llama", "eos_token_id", [1, 61]),
        ("mistral", "attn_logit_softcapping", 50.0),
        ("mistral", "hidden_act", "gelu"),
        ("mistral", "sliding_window", 0),
        ("mistral", "layer_types", ["full_attention"] * 6),
        ("qwen2", "max_window_layers", "all"),
        ("qwen2", "rope_type", "yarn"),
        ("qwen3", "attention_bias", True),
        ("qwen3", "layer_types", ["full_attention"] * 5),
        ("qwen3", "layer_types", ["chunked_attention"] * 6),
        ("qwen3", "layer_types", [["full_attention"]] * 6),
        ("qwen3", "query_pre_attn_scalar", 3),
        ("gemma2", "hidden_activation", "gelu"),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma2", "attn_logit_softcapping", -1.0),
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("gemma3_text", "rope_parameters", {"full_attention": {"rope_type": "dynamic"}}),
        ("opt", "do_layer_norm_before", False),
        ("opt", "activation_function", "gelu"),
        ("opt", "word_embed_proj_dim", 24),
        ("opt", "enable_bias", False),
        ("opt", "_remove_final_layer_norm", True),
        ("opt", "ffn_dim", None),
    ],
)
def test_what_is_not_declared_is_refused_by_name(model_type: str, field: str, value: object) -> None:
    """A value that would change the model, and those that are malformed."""
    fields = {"rope_scaling": {"rope_type": value}} if field == "rope_type" else {field: value}
    named = "rope_type" if field == "rope_parameters" else field
    with pytest.raises(ConfigError, match=named):
        layers(model_type, **fields)


def test_an_unknown_family_is_told_which_are_known() -> None:
    """All of them."""
    with pytest.raises(ConfigError, match=r"'mamba'.*llama, mistral, qwen2, qwen3, gemma2, gemma3_text, opt"):
        layers("mamba")
    assert len(FAMILIES) == 7


def test_windows_of_mistral() -> None:
    """An absent one is 4096, as in the first release; null is none."""
    assert windows("mistral") == [4096] * 6
    assert windows("mistral", sliding_window=None) == [None] * 6


def test_windows_of_qwen() -> None:
    """Only where they are in use, from max_window_layers on or as layer_types say."""
    assert windows("qwen2", sliding_window=4, max_window_layers=2) == [None] * 6
    in_use = {"use_sliding_window": True, "sliding_window": 4}
    assert windows("qwen2", **in_use, max_window_layers=2) == [None, None, 4, 4, 4, 4]
    types = ["sliding_attention", *["full_attention"] * 5]
    assert windows("qwen3", **in_use, layer_types=types) == [4, *[None] * 5]


def test_windows_and_ropes_of_gemma() -> None:
    """Every other layer; every sixth, in both spellings."""
    assert windows("gemma2", sliding_window=4) == [4, None] * 3
    scaled = LayerSpec(RopeSpec(1e6, LinearScaling(8.0)))
    linear = {"rope_type": "linear", "factor": 8.0}
    assert layers("gemma3_text", sliding_window=4) == (*[NEAR] * 5, FAR)
    assert layers("gemma3_text", sliding_window=4, sliding_window_pattern=2) == (NEAR, FAR) * 3
    assert layers("gemma3_text", sliding_window=4, rope_scaling=linear) == (*[NEAR] * 5, scaled)
    both = {"full_attention": {**linear, "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert layers("gemma3_text", sliding_window=4, rope_parameters=both) == (*[NEAR] * 5, scaled)


def test_two_spellings_of_rope_must_agree() -> None:
    """Whoever adds rope_scaling to a config.json that has rope_parameters is told; both may say the same."""
    both = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}, "rope_theta": 500.0}
    scaled = LayerSpec(RopeSpec(500.0, LinearScaling(2.0)))
    assert layers("llama", **both, rope_scaling={"type": "linear", "factor": 2.0}) == (scaled,) * 6
    with pytest.raises(ConfigError, match="rope_parameters and rope_scaling"):
        layers("llama", **both, rope_scaling={"type": "linear", "factor": 4.0})
    of_kinds = {"full_attention": {"rope_theta": 500.0}, "sliding_attention": {"rope_theta": 7.0}}
    found = layers("gemma3_text", rope_parameters=of_kinds, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert (found[0].rope, found[5].rope) == (RopeSpec(7.0), scaled.rope)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool])
def test_weights_of_a_quantised_checkpoint_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also where config.json does not say that they are."""
    path = write_family(tmp_path, "llama")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({**tensors, name: tensors[name].to(dtype)}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{name} has dtype {str(dtype).removeprefix('torch.')}, not supported"):
        load_decoder(path, dtype="float32")


def test_what_absent_fields_mean() -> None:
    """As in transformers, which leaves out what is its default."""
    gemma = parse_spec({**SIZES, "model_type": "gemma2", "head_dim": None, "num_key_value_heads": None}, "tiny")
    assert (gemma.head_dim, gemma.num_kv_heads, gemma.attention_scale, gemma.tie_embeddings) == (256, 4, 1 / 16, True)
    assert (gemma.attention_soft_cap, gemma.logit_soft_cap, gemma.embedding_scale) == (50.0, 30.0, 48**0.5)
    opt = parse_spec({**SIZES, "model_type": "opt", "num_key_value_heads": None, "head_dim": None}, "tiny")
    assert (opt.num_kv_heads, opt.norm.eps, opt.tie_embeddings, opt.context_len) == (8, 1e-5, True, 2048)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.2.self_attn.q_norm.weight"),
        ("gemma2", "model.layers.0.pre_feedforward_layernorm.weight"),
        ("opt", "model.decoder.embed_positions.weight"),
        ("opt", "model.decoder.final_layer_norm.bias"),
    ],
)
def test_the_first_tensor_that_differs_is_named(tmp_path: Path, case: str, name: str) -> None:
    """Of another shape, then missing."""
    path = write_family(tmp_path, case)
    tensors = load_file(path / "model.safetensors")
    shape = tuple(tensors[name].shape)
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        load_decoder(path, dtype="float32")
    assert f"tensor {name} has shape ({shape[0] - 1}," in str(error.value)
    assert f"expected {shape}" in str(error.value)
    del tensors[name]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"tensor {name} is missing"):
        load_decoder(path, dtype="float32")
