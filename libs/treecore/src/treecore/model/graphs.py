"""Steps of few rows as CUDA graphs, one for each bucket of sizes: launching kernels is what a small step waits for.

Knows a decoder's prepared rows and their sizes; must not know requests. Buckets, padding and refilling are tested with
a capture that only calls again; capturing itself HAS NOT RUN ON HARDWARE YET (scripts/gpu_check.sh compares replays).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treecore.model.batch import ForwardBatch
from treecore.model.decoder import Decoder, Prepared
from treecore.model.kv_pool import KvPool
from treecore.model.spec import ModelSpec

if TYPE_CHECKING:
    from treecore.model.kernels.attend import DeviceWork  # imports triton

MAX_ROWS = 256  # above, arithmetic is what a step waits for
MAX_GRAPHS = 64
_ROW_ARRAYS = ("words", "lows")
_TOLD_WIDTH = ("words", "tables")
_NO_ROW = -1

Replay = Callable[[], None]
Capture = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]
"""From a computation on fixed memory to what runs it again, and where its result stands then."""


@dataclass(frozen=True, slots=True)
class _Captured:
    static: Prepared
    replay: Replay
    logits: Tensor


class GraphedDecoder:
    """A whole decoder (one rank) on the Triton backend, whose small steps are replayed. Its pools have a spare slot.

    A step is padded to powers of two: of rows, logits, items, parts and tables. Padding rows write to the spare slot
    and attend to nothing. Not thread-safe; one pool only has graphs: the first that it makes.
    """

    def __init__(self, decoder: Decoder, capture: Capture | None = None) -> None:
        self._decoder = decoder
        self._capture = capture or capture_cuda
        self._graphs: dict[tuple[object, ...], _Captured] = {}
        self._pool: KvPool | None = None

    @property
    def spec(self) -> ModelSpec:
        """See Decoder."""
        return self._decoder.spec

    def new_pool(self, num_slots: int) -> KvPool:
        """See Decoder; with a spare slot, which no block has."""
        pool = self._decoder.new_pool(num_slots, num_spare=1)
        if self._pool is None:
            self.adopt(pool)
        return pool

    def adopt(self, pool: KvPool) -> None:
        """Graphs are of this pool, which has a slot to spare."""
        assert pool.kv.shape[1] > pool.num_slots, "padding rows write somewhere"
        self._pool = pool
        self._graphs.clear()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KvPool) -> Tensor:
        """See Decoder. The result is valid until the next forward."""
        fresh = self._decoder.prepare(batch)
        sizes = bucket(fresh)
        is_known = sizes in self._graphs
        if pool is not self._pool or len(fresh.tokens) > MAX_ROWS or (not is_known and len(self._graphs) >= MAX_GRAPHS):
            return self._decoder.run_prepared(fresh, pool, None)
        if not is_known:
            self._graphs[sizes] = self._captured(fresh, pool)
        graph = self._graphs[sizes]
        refill(graph.static, fresh, pool.num_slots)
        graph.replay()
        return graph.logits[: len(fresh.logit_rows)]

    def _captured(self, fresh: Prepared, pool: KvPool) -> _Captured:
        static = padded(fresh)
        refill(static, fresh, pool.num_slots)
        replay, logits = self._capture(lambda: self._decoder.run_prepared(static, pool, None))
        return _Captured(static, replay, logits)


def capture_cuda(compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
    """Runs `compute` aside first, which compiles its kernels: nothing may be compiled while a graph is captured."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        compute()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = compute()
    return graph.replay, logits


def bucket(rows: Prepared) -> tuple[object, ...]:
    """What two steps must have in common to share a graph: sizes up to the next power of two, and how tiles are cut."""
    plans = [(plan.tiling, plan.has_window, _ceil(plan.num_partials), *_shapes(plan)) for plan in rows.plans]
    return (_ceil(len(rows.tokens)), _ceil(len(rows.logit_rows)), *plans)


def padded(rows: Prepared) -> Prepared:
    """Memory for any step of the same bucket; what it holds is for `refill` to say."""

    def room(tensor: Tensor) -> Tensor:
        return tensor.new_zeros(_ceil(len(tensor)))

    plans = tuple(_padded_plan(plan, _ceil(len(rows.tokens))) for plan in rows.plans)
    return Prepared(room(rows.tokens), room(rows.positions), room(rows.slots), room(rows.logit_rows), plans)


def refill(static: Prepared, fresh: Prepared, spare_slot: int) -> None:
    """Puts `fresh` into `static`, in place, and makes what is left over harmless."""
    for name, left_over in (("tokens", 0), ("positions", 0), ("slots", spare_slot), ("logit_rows", 0)):
        _put(getattr(static, name), getattr(fresh, name), left_over)
    for old, new in zip(static.plans, fresh.plans, strict=True):
        for name in _tensors(old):
            left_over = {"rows": _NO_ROW, "starts": new.num_partials}.get(name, 0)
            _put(getattr(old, name), getattr(new, name), left_over)


def _padded_plan(plan: "DeviceWork", num_rows: int) -> "DeviceWork":
    shapes = dict(zip(_tensors(plan), _shapes(plan), strict=True))
    shapes |= {name: (num_rows, *shapes[name][1:]) for name in _ROW_ARRAYS} | {"starts": (num_rows + 1,)}
    room = {name: getattr(plan, name).new_zeros(shape) for name, shape in shapes.items()}
    return replace(plan, num_partials=_ceil(plan.num_partials), **room)


def _put(static: Tensor, fresh: Tensor, left_over: int) -> None:
    static.fill_(left_over)
    static[tuple(slice(size) for size in fresh.shape)].copy_(fresh)


def _tensors(plan: "DeviceWork") -> list[str]:
    return [field.name for field in fields(plan) if isinstance(getattr(plan, field.name), Tensor)]


def _shapes(plan: "DeviceWork") -> list[tuple[int, ...]]:
    """Of each tensor, rounded up where kernels are told the size. `starts` has one more than rows: theirs to say."""
    return [_shape(name, getattr(plan, name).shape) for name in _tensors(plan)]


def _shape(name: str, shape: torch.Size) -> tuple[int, ...]:
    if name == "starts":
        return ()
    first, *others = shape
    return (_ceil(first), *(_ceil(size) if name in _TOLD_WIDTH else size for size in others))


def _ceil(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 0).bit_length()
