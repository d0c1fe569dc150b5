"""A tiny teacher with a tokenizer, and teacher text out of thin air: for tests, at the size of milliseconds."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from torch import Tensor

from ssm_worker.boost.corpus import TeacherSequence
from ssm_worker.boost.start import KeptLayers, new_student
from ssm_worker.boost.student import Student
from treecore.testing.checkpoints import write_tiny_llama

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHARACTERS = ("\n", *map(chr, range(32, 127)))
VOCAB_SIZE = len(SPECIAL) + len(CHARACTERS)

TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message.role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_teacher(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """An instruct model's directory: random weights, and a tokenizer of single characters with a chat template."""
    settings = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, **overrides}
    write_tiny_llama(directory, seed=seed, **settings)
    _tiny_tokenizer().save(str(directory / "tokenizer.json"))
    config = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def prune(llm: Path, layers: tuple[int, ...], head: np.ndarray) -> Student:
    """The LLM's layers and those rows of its head."""
    return new_student(llm, KeptLayers(layers), head, 0)


def student_logits(student: Student, tokens: Sequence[int]) -> Tensor:
    """[L, V_out] of one sequence."""
    with torch.no_grad():
        return student.logits(student(torch.tensor([list(tokens)])))[0]


def random_sequences(count: int, vocab_size: int, *, seed: int = 0, num_top: int = 4) -> tuple[TeacherSequence, ...]:
    """Sequences of 4 to 19 tokens whose every position expects one token with probability 0.9, the same one each time.

    So there is something to learn: the token after t is mostly t * 7 + 3, modulo the vocabulary.
    """
    rng = np.random.default_rng(seed)
    return tuple(_random_sequence(rng, vocab_size, num_top) for _ in range(count))


def _random_sequence(rng: np.random.Generator, vocab_size: int, num_top: int) -> TeacherSequence:
    length = int(rng.integers(4, 20))
    start = int(rng.integers(1, 4))
    tokens = rng.integers(0, vocab_size, length)
    expected = tokens[start - 1 :] * 7 + 3
    logp = np.log([0.9, *[0.1 / (num_top - 1)] * (num_top - 1)])
    return TeacherSequence(
        tokens=tokens.astype(np.int32),
        start=start,
        temperature=0.0,
        top_ids=((expected[:, None] + np.arange(num_top)) % vocab_size).astype(np.int32),
        top_logp=np.tile(logp, (len(expected), 1)).astype(np.float16),
    )


def _tiny_tokenizer() -> Tokenizer:
    vocab = {text: token_id for token_id, text in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer
