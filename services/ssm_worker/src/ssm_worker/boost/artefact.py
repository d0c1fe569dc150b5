"""Students from checkpoints, and from a student the artefact that an SSM worker loads. Knows files; no training.

The artefact: config.json, and model.safetensors in bf16 with the layers 0..n-1 and the last norm. A student that lives
between the LLM's embedding and head leaves both in the LLM's checkpoint ("espalier": {"teacher_embedding": true}) and
has int32 `espalier.head_token_ids`; one with a vocabulary of its own brings both along, a plain checkpoint.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from ssm_worker.boost.student import Student, Vocabulary
from treecore.errors import ConfigError
from treecore.model.checkpoint import Checkpoint, shards
from treecore.model.config import read_json
from treecore.model.load import HEAD_TOKEN_IDS, expected_shapes, open_checkpoint
from treecore.model.spec import ModelSpec

_FINGERPRINT_BYTES = 1 << 20  # of each file; the header, which lists all tensors, and some weights


def open_llama(directory: Path) -> tuple[ModelSpec, Checkpoint]:
    """A Llama-family checkpoint. Raises ConfigError naming what is missing or of another family."""
    spec, checkpoint = open_checkpoint(directory)
    if spec.family != "llama":
        raise ConfigError(f"{directory}: model_type={spec.family!r}; only llama models are made smaller")
    for name, shape in expected_shapes(spec).items():
        if name not in checkpoint.names() or shape not in ((-1,), tuple(checkpoint.shape(name))):
            raise ConfigError(f"{directory}: tensor {name} is missing or not of shape {shape}")
    return spec, checkpoint


def open_llm(directory: Path) -> tuple[ModelSpec, Checkpoint]:
    """As open_llama, of a model that has an embedding to give."""
    spec, checkpoint = open_llama(directory)
    if spec.draft is not None:
        raise ConfigError(f"{directory}: is an SSM artefact itself; an LLM has an embedding of its own")
    return spec, checkpoint


def fingerprint(directory: Path) -> str:
    """Tells checkpoints apart by their config and the size and beginning of each file of weights."""
    try:
        digest = hashlib.sha256((directory / "config.json").read_bytes())
        for path in shards(directory):
            with path.open("rb") as file:
                digest.update(path.stat().st_size.to_bytes(8, "little") + file.read(_FINGERPRINT_BYTES))
    except OSError as error:
        raise ConfigError(f"{directory}: no checkpoint directory ({error})") from error
    return digest.hexdigest()[:16]


def read_student(directory: Path, llm: Path) -> Student:
    """The student that an artefact or a plain small checkpoint holds. Raises ConfigError, also if it cannot draft."""
    spec, checkpoint = open_llama(directory)
    llm_spec, llm_checkpoint = open_llm(llm)
    if spec.vocab_size != llm_spec.vocab_size:
        raise ConfigError(f"{directory}: vocab_size={spec.vocab_size}, but {llm} has {llm_spec.vocab_size}")
    vocabulary_names = {HEAD_TOKEN_IDS, spec.tensors.embedding, spec.tensors.head}
    weights = {name: checkpoint.tensor(name) for name in expected_shapes(spec).keys() - vocabulary_names}
    if spec.draft is None:
        vocabulary = own_vocabulary(spec, checkpoint, torch.arange(spec.vocab_size))
        return Student(spec, weights, replace(vocabulary, is_borrowed=False), read_json(directory / "config.json"))
    if not spec.draft.teacher_embedding or not spec.draft.trimmed_head or spec.hidden_size != llm_spec.hidden_size:
        raise ConfigError(f"{directory}: no SSM artefact that fits {llm}")
    vocabulary = own_vocabulary(llm_spec, llm_checkpoint, checkpoint.tensor(HEAD_TOKEN_IDS).long())
    return Student(replace(spec, draft=None), weights, vocabulary, read_json(directory / "config.json"))


def own_vocabulary(spec: ModelSpec, checkpoint: Checkpoint, head_token_ids: Tensor) -> Vocabulary:
    """Both ends of a checkpoint, the head trimmed to `head_token_ids`, for students to borrow."""
    embedding = checkpoint.tensor(spec.tensors.embedding)
    head = embedding if spec.tie_embeddings else checkpoint.tensor(spec.tensors.head)
    return Vocabulary(embedding, head[head_token_ids].float(), head_token_ids)


def export_artefact(student: Student, artefact: Path, logit_scale: float = 1.0) -> None:
    """Write the artefact's two files, each whole or not at all. Other fields of config.json stay as they were.

    logit_scale: the artefact's logits are the student's times it, by way of the last norm.
    """
    artefact.mkdir(parents=True, exist_ok=True)
    norm = student.spec.tensors.norm
    scaled = {**student.state_dict(), norm: student.state_dict()[norm] * logit_scale}
    tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in scaled.items()}
    config = json.dumps(_config(student), indent=1) + "\n"
    _write(artefact / "model.safetensors", save({**tensors, **_vocabulary_tensors(student)}, metadata={"format": "pt"}))
    _write(artefact / "config.json", config.encode())


def _vocabulary_tensors(student: Student) -> Mapping[str, Tensor]:
    spec, vocabulary = student.spec, student.vocabulary
    if vocabulary.is_borrowed:
        return {HEAD_TOKEN_IDS: vocabulary.head_token_ids.int()}
    head = {} if spec.tie_embeddings else {spec.tensors.head: vocabulary.head.bfloat16()}
    return {spec.tensors.embedding: vocabulary.embedding.bfloat16(), **head}


def _config(student: Student) -> dict[str, object]:
    """The end-of-sequence ids come from the spec, because generation_config.json may override config.json."""
    spec = student.spec
    return {
        **{name: value for name, value in student.config.items() if name != "espalier"},
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "dtype": "bfloat16",
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids),
        **({"espalier": {"teacher_embedding": True}} if student.vocabulary.is_borrowed else {}),
    }


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)
