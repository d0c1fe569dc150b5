"""GGUF files of the Llama family, as the tensors and the configuration that a Hugging Face checkpoint would hold.

Knows llama.cpp's names and its order of q and k rows; must not know decoders or tokenizers.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from torch import Tensor

from treecore.errors import ConfigError

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GgufFile:
    """An open GGUF file: metadata by key, tensors by their Hugging Face names, dequantised to fp16 one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open(path)
        self._tensors = {hf_name(path, tensor.name): tensor for tensor in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value at `key`."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """The metadata value at `key`. Raises ConfigError where it is absent."""
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self.path}: metadata {key} is missing")
        return value

    def names(self) -> set[str]:
        """All tensors that the decoder knows a name for."""
        return set(self._tensors)

    def shape(self, name: str) -> Sequence[int]:
        """Row-major, as torch states it; GGUF states the fastest dimension first."""
        return [int(size) for size in reversed(self._tensors[name].shape)]

    def tensor(self, name: str) -> Tensor:
        """The tensor in fp16. Raises ConfigError where a value does not fit."""
        stored = self._tensors[name]
        values = dequantize(stored.data, stored.tensor_type).reshape(self.shape(name))
        half = torch.from_numpy(np.array(self._row_order(name, values))).half()  # a copy: the file is read-only
        if not torch.isfinite(half).all():
            raise ConfigError(f"{self.path}: tensor {stored.name} has values beyond fp16")
        return half

    def part(self, name: str, rows: range, columns: range | None = None) -> Tensor:
        """Rows and columns of the tensor. All of it is read: quantised blocks lie across them."""
        cut = self.tensor(name)[rows.start : rows.stop]
        return cut if columns is None else cut[:, columns.start : columns.stop]

    def _row_order(self, name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """llama.cpp puts the two halves of a rotated pair side by side; Hugging Face keeps them half a head apart."""
        if not name.endswith(("q_proj.weight", "k_proj.weight")):
            return values
        key = "llama.attention.head_count" + ("_kv" if name.endswith("k_proj.weight") else "")
        pairs = values.reshape(int(self.require(key)), -1, 2, values.shape[1])
        return pairs.swapaxes(1, 2).reshape(values.shape)


def hf_name(path: Path, name: str) -> str:
    """The Hugging Face name of a GGUF tensor."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in LAYER_NAMES:
        raise ConfigError(f"{path}: tensor {name} is not part of this architecture")
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"


def hf_config(file: GgufFile) -> Mapping[str, Any]:
    """The config.json that a Hugging Face checkpoint of the same model would have."""
    if (architecture := file.require("general.architecture")) != "llama":
        raise ConfigError(f"{file.path}: general.architecture={architecture!r} is not supported (expected 'llama')")
    if file.get("llama.rope.scaling.type", "none") != "none":
        raise ConfigError(
            f"{file.path}: scaled rotary embeddings are not read from GGUF; take the Hugging Face checkpoint"
        )
    num_heads = int(file.require("llama.attention.head_count"))
    hidden_size = int(file.require("llama.embedding_length"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "vocab_size": int(file.get("llama.vocab_size") or len(file.require("tokenizer.ggml.tokens"))),
        "hidden_size": hidden_size,
        "intermediate_size": int(file.require("llama.feed_forward_length")),
        "num_hidden_layers": int(file.require("llama.block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(file.get("llama.attention.head_count_kv", num_heads)),
        "head_dim": int(file.get("llama.rope.dimension_count") or hidden_size // num_heads),
        "hidden_act": "silu",
        "max_position_embeddings": int(file.require("llama.context_length")),
        "rms_norm_eps": float(
            str(np.float32(file.require("llama.attention.layer_norm_rms_epsilon")))
        ),  # 1e-05, as written
        "rope_theta": float(file.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "lm_head.weight" not in file.names(),
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }


def _open(path: Path) -> Any:
    try:
        return GGUFReader(path)
    except Exception as error:  # the reader raises whatever it stumbles over: ValueError, IndexError, OSError
        raise ConfigError(f"{path}: not a readable GGUF file ({error})") from error
