"""From a batch's logits to what each request needs of them: its tokens, chosen on the device, or the logits themselves.

Knows batches and parameters; must not know caches or kernels. Logits of plain requests (temperature and seed alone)
never leave the device; whatever else shapes a law is computed by the host (treecore.law).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treecore.messages import Tokens
from treecore.model.batch import ForwardBatch, IntArray, Segment
from treecore.params import SamplingParams

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The token behind each row, int32 [n]; -1 where the row's logits are no numbers."""

    tokens: Tokens


ChooseTokens = Callable[[Tensor, Sequence[SamplingParams], Sequence[IntArray]], Tokens]
"""Of logits [n, V] on the device and, per request, parameters and the positions of its tokens: int32 [n]."""


def read_logits(batch: ForwardBatch, logits: Tensor) -> list[Rows]:
    """Each segment's logits on the host, fp32 [n, V]."""
    return [part.numpy() for part in batch.split_logits(logits.cpu())]  # waits for the forward


def read_answers(
    batch: ForwardBatch, logits: Tensor, plain: Sequence[SamplingParams | None], choose: ChooseTokens
) -> list[Rows | Chosen]:
    """Per segment its tokens where `plain` has its parameters, else its logits; each crosses to the host once."""
    rows = np.split(np.arange(len(logits)), np.cumsum(batch.num_logits)[:-1])
    chosen = [idx for idx, params in enumerate(plain) if params is not None]
    others = [idx for idx, params in enumerate(plain) if params is None]
    positions = [_token_positions(batch.segments[idx]) for idx in chosen]
    tokens = choose(_pick(logits, rows, chosen), [params for params in plain if params is not None], positions)
    rest: Rows = _pick(logits, rows, others).cpu().numpy()
    answers: dict[int, Rows | Chosen] = {
        **{idx: Chosen(tokens[span]) for idx, span in _spans(chosen, batch.num_logits)},
        **{idx: rest[span] for idx, span in _spans(others, batch.num_logits)},
    }
    return [answers[idx] for idx in range(len(plain))]


def joined(parts: Sequence[Rows | Chosen]) -> Rows | Chosen:
    """The answers of consecutive rows of one request as one."""
    if len(parts) == 1:
        return parts[0]
    tokens = [part.tokens for part in parts if isinstance(part, Chosen)]
    return Chosen(np.concatenate(tokens)) if tokens else np.concatenate([p for p in parts if not isinstance(p, Chosen)])


def _token_positions(segment: Segment) -> IntArray:
    """Of the tokens behind the rows whose logits are wanted."""
    return segment.positions[segment.logit_rows] + 1


def _pick(logits: Tensor, rows: Sequence[NDArray[np.intp]], segments: Sequence[int]) -> Tensor:
    if len(segments) == len(rows):
        return logits
    wanted = np.concatenate([np.empty(0, np.int64), *(rows[idx] for idx in segments)])
    return logits.index_select(0, torch.from_numpy(wanted).to(logits.device))


def _spans(segments: Sequence[int], num_logits: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Where each of `segments` lies among the picked rows."""
    begin = 0
    for idx in segments:
        yield idx, slice(begin, begin + num_logits[idx])
        begin += num_logits[idx]
