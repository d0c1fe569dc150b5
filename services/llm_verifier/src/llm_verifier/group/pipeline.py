"""One forward through the stages of a group, in micro-batches. Knows the order of work; nothing of processes' fates."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from llm_verifier.group.collectives import Collectives
from treecore.model.batch import ForwardBatch, Segment
from treecore.model.decoder import Decoder
from treecore.model.kv_pool import KvPool

PIECE_ROWS = {"cpu": 8, "cuda": 128}
"""Fewest rows of a micro-batch by kind of device: a stage reads its weights once a piece, however few rows that has."""


class Pipeline:
    """A rank's part in forwards. All ranks run the same segments in the same order."""

    def __init__(self, decoder: Decoder, collectives: Collectives) -> None:
        self._decoder = decoder
        self._collectives = collectives

    def run(self, batch: ForwardBatch, pool: KvPool) -> Tensor | None:
        """The whole forward. Rank 0 gets fp32 [num_logit_rows, V_out], in the order of the segments; others None.

        All receives are posted first: between two ranks every message then has one order, which NCCL needs.
        """
        pieces = micro_batches(batch, self._decoder.place.pp_size, PIECE_ROWS[self._decoder.device.type])
        arriving = [self._expect(piece) for piece in pieces]
        parts, leaving = [], []
        for piece, incoming in zip(pieces, arriving, strict=True):
            out = self._decoder.run_stage(piece, pool, incoming())
            if self._decoder.place.is_last:
                parts.append(out)
            else:
                leaving.append(self._collectives.send_next(out))
        for wait in leaving:
            wait()
        return self._brought_back(len(batch.logit_rows), parts)

    def _expect(self, piece: ForwardBatch) -> Callable[[], Tensor | None]:
        decoder = self._decoder
        if decoder.place.is_first:
            return lambda: None
        shape = (len(piece.tokens), decoder.spec.hidden_size)
        return self._collectives.receive_previous(shape, decoder.activation_dtype, decoder.device)

    def _brought_back(self, num_rows: int, parts: list[Tensor]) -> Tensor | None:
        """The logits at rank 0. Where none are wanted nobody waits for the last stage."""
        place, spec = self._decoder.place, self._decoder.spec
        if place.tp_rank:
            return None
        if place.is_first and place.is_last:
            return torch.cat(parts)
        if place.is_first:
            shape = (num_rows, spec.vocab_size)
            return self._collectives.receive_back(shape, self._decoder.device) if num_rows else torch.empty(shape)
        if place.is_last and num_rows:
            self._collectives.send_back(torch.cat(parts))
        return None


def micro_batches(batch: ForwardBatch, num_stages: int, piece_rows: int) -> list[ForwardBatch]:
    """The batch's rows in as many consecutive equal pieces as stages, fewer where they had less than `piece_rows`.

    A piece may begin within a segment: its rows' K and V of the piece before are written by then, in every stage.
    """
    num_rows = len(batch.tokens)
    num_pieces = max(1, min(num_stages, num_rows // piece_rows))
    if num_pieces == 1:
        return [batch]
    borders = [num_rows * idx // num_pieces for idx in range(num_pieces + 1)]
    return [ForwardBatch.from_segments(_rows(batch.segments, *piece)) for piece in pairwise(borders)]


def _rows(segments: tuple[Segment, ...], first: int, last: int) -> list[Segment]:
    found, start = [], 0
    for segment in segments:
        begin, end = max(first - start, 0), min(last - start, segment.num_rows)
        if begin < end:
            found.append(segment.rows(begin, end) if end - begin < segment.num_rows else segment)
        start += segment.num_rows
    return found
