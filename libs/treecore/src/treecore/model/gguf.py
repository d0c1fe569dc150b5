"""GGUF files: read as a checkpoint, or written out as a Hugging Face directory, tokenizer included. Runs no model.

The same input gives the same bytes, so that a digest of the result can be pinned. Only byte-level BPE with SmolLM2's
pre-tokenizer is written: another one would encode text differently without anyone noticing.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from treecore.errors import ConfigError
from treecore.model.families import parse_spec
from treecore.model.gguf_file import GgufFile, hf_config
from treecore.model.spec import ModelSpec

CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

Progress = Callable[[int, int], None]


def read_gguf(path: Path) -> tuple[ModelSpec, GgufFile]:
    """The spec and the tensors of a GGUF file. Raises ConfigError naming what cannot be read or is not supported."""
    file = GgufFile(path)
    return parse_spec(hf_config(file), name=path.stem), file


def convert_gguf(path: Path, out_dir: Path, progress: Progress | None = None) -> None:
    """Writes config.json, model.safetensors (fp16), tokenizer.json and tokenizer_config.json to `out_dir`.

    Calls progress(done, total) after each tensor. Raises ConfigError before anything is written where the file, its
    architecture or its tokenizer is not supported. The weights are written last: where they are, all else is.
    """
    file = GgufFile(path)
    config = hf_config(file)
    tokenizer, tokenizer_config = tokenizer_json(file), hf_tokenizer_config(file)
    tensors = _read_tensors(file, progress or (lambda _done, _total: None))
    out_dir.mkdir(parents=True, exist_ok=True)
    _write_json(out_dir / "config.json", config)
    _write_json(out_dir / "tokenizer_config.json", tokenizer_config)
    _write_json(out_dir / "tokenizer.json", tokenizer)
    unfinished = out_dir / "model.safetensors.part"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    # safetensors lets its owner alone read it; who serves may be another user
    unfinished.chmod((out_dir / "config.json").stat().st_mode)
    unfinished.replace(out_dir / "model.safetensors")


def tokenizer_json(file: GgufFile) -> Mapping[str, Any]:
    """The tokenizer.json of the file's vocabulary and merges: digits one by one, then byte-level BPE, as in SmolLM2."""
    kind = (file.require("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ConfigError(f"{file.path}: tokenizer {kind} is not converted (only gpt2 with smollm); take the original")
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    types: list[int] = file.require("tokenizer.ggml.token_type")
    merges: list[str] = file.require("tokenizer.ggml.merges")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = [idx for idx, token_type in enumerate(types) if token_type == CONTROL_TOKEN]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(idx, tokens[idx]) for idx in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": _bpe(tokens, merges),
    }


def hf_tokenizer_config(file: GgufFile) -> Mapping[str, Any]:
    """The tokenizer_config.json: special tokens by name, the chat template, and nothing that changes the text."""
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL_TOKENS.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(file.require("llama.context_length")),
        **{name: tokens[token_id] for name, token_id in ids.items() if token_id is not None},
        **({"chat_template": template} if (template := file.get("tokenizer.chat_template")) else {}),
    }


def _added_token(token_id: int, content: str) -> Mapping[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": True}


def _bpe(tokens: list[str], merges: list[str]) -> Mapping[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: idx for idx, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in merges],
    }


def _read_tensors(file: GgufFile, progress: Progress) -> dict[str, Tensor]:
    names = sorted(file.names())
    tensors = {}
    for done, name in enumerate(names, start=1):
        tensors[name] = file.tensor(name)
        progress(done, len(names))
    return tensors


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
