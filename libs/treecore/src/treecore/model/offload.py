"""Layers whose matrices stream through two slots while others compute. Knows slots and layers; nothing of a forward.

(SpecInfer, Figure 8: verifying a tree reads the weights once, so offloaded models gain the most from it.)
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from treecore.model.assemble import Assembler
from treecore.model.checkpoint import Checkpoint
from treecore.model.decoder import Layer, Layers
from treecore.model.linear import Linear, Precision, linear_in_place, rounded
from treecore.model.pieces import Pieces, read_whole, whole_shape

NUM_SLOTS = 2


class Source(Protocol):
    """Where the matrices are while they are not in a slot."""

    def add(self, pieces: Pieces) -> int:
        """Learns of a matrix; returns its number."""

    def write(self, number: int, weight: Tensor) -> None:
        """Writes a matrix over `weight`, rounded as all weights are. Called from another thread."""


class DiskSource:
    """The checkpoint itself, piece by piece: nothing is kept in memory."""

    def __init__(self, checkpoint: Checkpoint, precision: Precision) -> None:
        self._checkpoint = checkpoint
        self._precision = precision
        self._matrices: list[Pieces] = []

    def add(self, pieces: Pieces) -> int:
        """See Source."""
        self._matrices.append(pieces)
        return len(self._matrices) - 1

    def write(self, number: int, weight: Tensor) -> None:
        """See Source. Raises ConfigError where the file cannot be read any more."""
        sizes = [len(piece.rows) for piece in self._matrices[number]]
        for piece, rows in zip(self._matrices[number], torch.split(weight, sizes), strict=True):
            rows.copy_(rounded(piece.read(self._checkpoint), self._precision))


class HostSource:
    """Memory of the host, pinned, for layers that stream to a GPU."""

    def __init__(self, checkpoint: Checkpoint, precision: Precision) -> None:
        self._checkpoint = checkpoint
        self._precision = precision
        self._matrices: list[Tensor] = []

    def add(self, pieces: Pieces) -> int:
        """See Source. Reads the matrix."""
        self._matrices.append(rounded(read_whole(pieces, self._checkpoint), self._precision).pin_memory())
        return len(self._matrices) - 1

    def write(self, number: int, weight: Tensor) -> None:
        """See Source."""
        weight.copy_(self._matrices[number], non_blocking=True)


@dataclass(slots=True)
class _Slot:
    """Memory for one layer's matrices; `used_up` is when a GPU has done with what is in it."""

    weights: list[Tensor] = field(default_factory=list)
    used_up: torch.cuda.Event | None = None


class Streamer:
    """Makes layers whose matrices are in a slot only while they compute; the first `num_resident` stay as they are."""

    def __init__(self, source: Source, precision: Precision, num_resident: int) -> None:
        self._source = source
        self._precision = precision
        self._num_resident = num_resident
        self._slots = [_Slot() for _ in range(NUM_SLOTS)]
        self._layers: list[Layer] = []
        self._numbers: list[list[int]] = []

    def layers(self, assembler: Assembler, wanted: Sequence[tuple[int, int]]) -> Layers:
        """The layers of these indices and kinds. To be called once."""
        resident = tuple(assembler.layer(*layer) for layer in wanted[: self._num_resident])
        streamed = tuple(self._layer(assembler, *layer) for layer in wanted[self._num_resident :])
        if not streamed:
            return resident
        return StreamedLayers(resident, streamed, self._source, self._slots, self._numbers)

    def _layer(self, assembler: Assembler, layer_idx: int, kind: int) -> Layer:
        self._numbers.append([])
        return assembler.layer(layer_idx, kind, self._make)

    def _make(self, pieces: Pieces) -> Linear:
        """A linear over memory of the layer's slot, which all layers of that slot share: they are of equal shapes."""
        slot, numbers = self._slots[(len(self._numbers) - 1) % NUM_SLOTS], self._numbers[-1]
        shape = whole_shape(pieces)
        if len(numbers) == len(slot.weights):
            slot.weights.append(torch.empty(shape, dtype=self._precision.activation, device=self._precision.device))
        weight = slot.weights[len(numbers)]
        assert weight.shape == shape, "layers that stream have equal shapes"
        numbers.append(self._source.add(pieces))
        return linear_in_place(weight, self._precision)


class StreamedLayers:
    """Layers to be iterated over by one forward at a time; ahead of each use a thread fills the next slot.

    A slot is filled again as soon as the layer behind the one in it is asked for, across forwards too.
    """

    def __init__(
        self,
        resident: Sequence[Layer],
        streamed: Sequence[Layer],
        source: Source,
        slots: Sequence[_Slot],
        numbers: Sequence[Sequence[int]],
    ) -> None:
        self._resident = resident
        self._streamed = streamed
        self._source = source
        self._slots = slots
        self._numbers = numbers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload")
        self._stream = torch.cuda.Stream() if slots[0].weights[0].is_cuda else None  # type: ignore[no-untyped-call]
        self._filling: deque[tuple[int, Future[None]]] = deque()
        self._fill_ahead()

    def __len__(self) -> int:
        return len(self._resident) + len(self._streamed)

    def __iter__(self) -> Iterator[Layer]:
        yield from self._resident
        self._rewind()
        for idx, layer in enumerate(self._streamed):
            self._filling[0][1].result()
            yield layer
            self._leave(self._slots[idx % NUM_SLOTS])
            self._filling.popleft()
            self._fill_ahead()

    def _rewind(self) -> None:
        """After a forward that broke off, the first layer is not the one that is filled next."""
        if self._filling[0][0] == 0:
            return
        for _, future in self._filling:
            future.cancel()
        self._filling.clear()
        self._fill_ahead()

    def _fill_ahead(self) -> None:
        """Starts filling what comes next, as long as its slot is not one of those that are filled or in use."""
        while True:
            layer_idx = (self._filling[-1][0] + 1) % len(self._streamed) if self._filling else 0
            if any(layer_idx % NUM_SLOTS == idx % NUM_SLOTS for idx, _ in self._filling):
                return
            self._filling.append((layer_idx, self._thread.submit(self._fill, layer_idx)))

    def _fill(self, layer_idx: int) -> None:
        slot = self._slots[layer_idx % NUM_SLOTS]
        with torch.inference_mode(), self._copying(slot):
            for number, weight in zip(self._numbers[layer_idx], slot.weights, strict=True):
                self._source.write(number, weight)
            if self._stream is not None:
                self._stream.synchronize()

    def _copying(self, slot: _Slot) -> "torch.cuda.StreamContext | nullcontext[None]":
        """On a GPU: in a stream of its own, behind what still reads the slot."""
        if self._stream is None:
            return nullcontext()
        if slot.used_up is not None:
            self._stream.wait_event(slot.used_up)
        return torch.cuda.stream(self._stream)

    def _leave(self, slot: _Slot) -> None:
        if self._stream is not None:
            slot.used_up = torch.cuda.current_stream().record_event()
