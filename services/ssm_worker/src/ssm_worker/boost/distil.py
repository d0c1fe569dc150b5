"""Distillation: the student learns the teacher's top-K distribution. Knows batches and gradients; nothing of files.

The loss is the cross-entropy between both laws at temperature T (Hinton et al., arXiv 1503.02531), over the teacher's
top K tokens as far as the trimmed head has them.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ssm_worker.boost.batches import BatchOrder, TrainingBatch, collate
from ssm_worker.boost.lessons import Lessons
from ssm_worker.boost.student import Student, column_of_token
from treecore.errors import ConfigError

ABSENT = -1e4  # a log-prob of nothing, but finite: softmax over nothing would be NaN
TINY = 1e-9  # instead of the weight of nothing
EMA_DECAY = 0.98

Targets = Literal["soft", "hard"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a student is trained. Equal recipe, equal lessons, equal machine: equal student, bit for bit.

    start: what it was before, llm: the fingerprint of whom it learns from. targets: the LLM's law, or its best token.
    token_visits: tokens that training reads, over all passes. lr falls along a cosine from `peak_lr` to
    `final_lr_share` of it, after a linear warm-up. A pool is what is sorted by length before batches are cut.
    logit_scale: see export_artefact.
    """

    start: str
    llm: str
    num_head_rows: int
    token_visits: int
    targets: Targets = "soft"
    seed: int = 0
    peak_lr: float = 1.5e-3
    final_lr_share: float = 0.02
    num_warmup_steps: int = 50
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    batch_len: int = 8
    pool_len: int = 64
    temperature: float = 0.6
    logit_scale: float = 1.0

    def lr(self, step: int, num_visited: int) -> float:
        """The learning rate of `step` (from 0), before which `num_visited` tokens were read."""
        warmup = min(1.0, (step + 1) / self.num_warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(num_visited / self.token_visits, 1.0)))
        return self.peak_lr * warmup * (self.final_lr_share + (1 - self.final_lr_share) * cosine)


class Distiller:
    """Trains `student` in place. Owns the optimiser and the counters; `order` follows from the counters."""

    def __init__(self, student: Student, lessons: Lessons, recipe: Recipe) -> None:
        self.student = student
        self.recipe = recipe
        self.optimiser = torch.optim.AdamW(
            student.parameters(), lr=recipe.peak_lr, weight_decay=recipe.weight_decay, betas=recipe.betas
        )
        self.num_steps, self.num_visited = 0, 0
        self.mean_loss: float | None = None  # exponential moving average, for people
        self._lessons = lessons
        lengths = [len(sequence.tokens) for sequence in lessons.sequences]
        self._order = BatchOrder(lengths, recipe.seed, recipe.batch_len, recipe.pool_len)
        self._column_of = column_of_token(student.vocabulary.head_token_ids, student.spec.vocab_size)

    @property
    def is_done(self) -> bool:
        """Whether the recipe's tokens are all read."""
        return self.num_visited >= self.recipe.token_visits

    def step(self) -> int:
        """One optimiser step. Returns how many tokens it read. Raises ConfigError once the loss is no number."""
        batch = self._batch(self._order[self.num_steps])
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.lr(self.num_steps, self.num_visited)
        loss = self._loss(batch)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.student.parameters(), self.recipe.max_grad_norm)
        self.optimiser.step()
        self._count(loss.item(), batch.num_tokens)
        return batch.num_tokens

    def _batch(self, indices: NDArray[np.intp]) -> TrainingBatch:
        lessons = self._lessons
        batch = collate([lessons.sequences[idx] for idx in indices], [lessons.weights[idx] for idx in indices])
        if self.recipe.targets == "soft":
            return batch
        return replace(batch, top_ids=batch.top_ids[:, :1], top_logp=batch.top_logp[:, :1])

    def _loss(self, batch: TrainingBatch) -> Tensor:
        hidden = self.student(batch.tokens)[batch.is_target]
        scores = self.student.logits(hidden / self.recipe.temperature)  # fewer numbers to divide than afterwards
        return distillation_loss(scores, batch, self._column_of, self.recipe.temperature)

    def _count(self, loss: float, num_tokens: int) -> None:
        if not math.isfinite(loss):
            raise ConfigError(f"the loss became {loss} at step {self.num_steps}; train with a lower learning rate")
        self.num_steps += 1
        self.num_visited += num_tokens
        self.mean_loss = loss if self.mean_loss is None else EMA_DECAY * self.mean_loss + (1 - EMA_DECAY) * loss


def distillation_loss(scores: Tensor, batch: TrainingBatch, column_of: Tensor, temperature: float) -> Tensor:
    """Weighted mean over positions of -sum_v p(v) log q(v), in nats; column_of int64 [V].

    q is the student's law at `temperature`: the softmax of scores fp32 [M, V_out], its logits over the temperature.

    p is the teacher's law at `temperature` on those of its top K tokens that the head has, renormalised. A position
    where it has none teaches nothing and is left out.
    """
    column = column_of[batch.top_ids]
    in_head = column >= 0
    p = torch.where(in_head, batch.top_logp / temperature, torch.tensor(ABSENT)).softmax(-1)
    log_q = scores.log_softmax(-1).gather(1, column.clamp_min(0))
    weights = batch.weights * in_head.any(1)
    return -((p * log_q).sum(1) * weights).sum() / weights.sum().clamp_min(TINY)
