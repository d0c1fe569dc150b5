"""Tiny Llama checkpoints with random weights, as real directories. Knows the file format; nothing of decoders."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TINY: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_tiny_llama(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Writes config.json (TINY with `overrides`) and model.safetensors; the same seed gives the same bytes."""
    config = {**TINY, **overrides}
    tensors = random_tensors(config, seed)
    write_checkpoint(directory, config, {name: tensor.to(dtype) for name, tensor in tensors.items()})
    return directory


def write_tiny_draft(directory: Path, *, token_ids: list[int], seed: int = 1, **overrides: Any) -> Path:
    """Writes an SSM artefact: no embedding, a head trimmed to `token_ids`. Any tiny Llama can be its teacher."""
    config = {**TINY, **overrides, "espalier": {"teacher_embedding": True, "head_token_ids": True}}
    tensors = random_tensors(config, seed)
    tensors = {name: tensor for name, tensor in tensors.items() if "embed" not in name and "head" not in name}
    tensors["espalier.head_token_ids"] = torch.tensor(token_ids, dtype=torch.int32)
    write_checkpoint(directory, config, tensors)
    return directory


def write_checkpoint(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes config.json and model.safetensors; makes the directory if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config), indent=1), encoding="utf-8")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})


def random_tensors(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """All tensors that a Llama checkpoint of `config` has, float32, large enough that logits differ by whole units."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(shape, generator) for name, shape in _shapes(config).items()}


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    return 1 + 0.1 * noise if len(shape) == 1 else noise * 1.5 / shape[1] ** 0.5


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer_idx in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer_idx}.{name}.weight": shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    return {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
