"""Tiny checkpoints for tests: a random byte-level Llama with its tokenizer, written in milliseconds.

One token a byte and EOS as id 0, so multi-byte characters always span tokens. Needs safetensors (`treecore[model]`).
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

CONTEXT_LEN = 160
VOCAB_SIZE = 257
EOS_TOKEN = "<|end|>"

_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _HEAD_DIM = 64, 128, 4, 2, 16
_SCALE = 0.3  # large enough that the next token depends on the whole context


def save_random_llama(directory: Path, *, num_layers: int, seed: int) -> Path:
    """Write config.json, model.safetensors (float32) and tokenizer.json; the same for the same seed."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    save_file(_tensors(num_layers, rng), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_config(num_layers)))
    (directory / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    return directory


def _tensors(num_layers: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    def matrix(num_rows: int, num_columns: int) -> np.ndarray:
        return (rng.standard_normal((num_rows, num_columns)) * _SCALE).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, _HIDDEN),
        "model.norm.weight": np.ones(_HIDDEN, np.float32),
        "lm_head.weight": matrix(VOCAB_SIZE, _HIDDEN),
    }
    for layer_idx in range(num_layers):
        layer = {
            "input_layernorm": np.ones(_HIDDEN, np.float32),
            "self_attn.q_proj": matrix(_HEADS * _HEAD_DIM, _HIDDEN),
            "self_attn.k_proj": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            "self_attn.v_proj": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            "self_attn.o_proj": matrix(_HIDDEN, _HEADS * _HEAD_DIM),
            "post_attention_layernorm": np.ones(_HIDDEN, np.float32),
            "mlp.gate_proj": matrix(_INTERMEDIATE, _HIDDEN),
            "mlp.up_proj": matrix(_INTERMEDIATE, _HIDDEN),
            "mlp.down_proj": matrix(_HIDDEN, _INTERMEDIATE),
        }
        tensors |= {f"model.layers.{layer_idx}.{name}.weight": tensor for name, tensor in layer.items()}
    return tensors


def _config(num_layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": 0,
    }


def _tokenizer() -> dict[str, object]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {EOS_TOKEN: 0} | {letter: idx for idx, letter in enumerate(_byte_letters(), start=1)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 0, "content": EOS_TOKEN, **flags}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def _byte_letters() -> list[str]:
    """The printable letter of each byte in GPT-2's byte-level alphabet, in byte order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
