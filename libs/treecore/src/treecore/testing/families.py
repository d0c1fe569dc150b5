"""Tiny random checkpoints of every family, as transformers writes and reads them: the oracle of the decoder's tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_SIZES: Mapping[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 51,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 4}

# Three layers, three KV heads, 51 inner features and 61 tokens divide by neither two ranks nor two stages.
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama3": ("llama", {"rope_scaling": _LLAMA3, "rope_theta": 5e5, "tie_word_embeddings": True}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "mistral_no_window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**_GEMMA, "sliding_window_pattern": 2}),
    "opt": ("opt", {"ffn_dim": 51, "num_key_value_heads": 6}),
}


def write_family(directory: Path, case: str, **overrides: Any) -> Path:
    """Writes a checkpoint of one of CASES with save_pretrained, fp32; weights large enough that everything matters."""
    model_type, fields = CASES[case]
    fields = {**_SIZES, **fields, **overrides}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            CONFIG_MAPPING[model_type](**fields)
        )
        for weight in model.parameters():
            noise = torch.randn(weight.shape)
            weight.data = noise * (1.5 / weight.shape[1] ** 0.5 if weight.ndim > 1 else 0.3)
            if weight.ndim == 1 and model_type not in ("gemma2", "gemma3_text"):
                weight.data += 1.0
    model.save_pretrained(directory)
    return directory


def load_reference(path: Path) -> PreTrainedModel:
    """The same checkpoint in transformers, fp32, with its plainest attention."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()  # type: ignore[no-untyped-call]
    return model
