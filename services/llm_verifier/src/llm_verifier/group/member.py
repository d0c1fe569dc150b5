"""How a process becomes a member of its group: meet, connect, load its part; and how it ends with a group that failed.

Knows the order of a start; what a rank does afterwards is in ranks.py.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from llm_verifier.group.collectives import Activity, CollectiveFailed, Collectives, connect, open_store
from llm_verifier.group.fate import Ending
from llm_verifier.group.fingerprint import facts
from llm_verifier.group.forming import Patience, gather_ranks, join_ranks
from llm_verifier.group.ranks import GroupDecoder, follow
from llm_verifier.group.seat import Seat
from llm_verifier.group.watch import FollowerWatch, LeaderWatch, OnEnd
from llm_verifier.settings import VerifierSettings
from treecore.errors import ConfigError, Unavailable
from treecore.model.backend import Hardware, choose_device
from treecore.model.decoder import Decoder
from treecore.model.load import load_decoder
from treecore.service.telemetry import log_event

logger = logging.getLogger(__name__)

_EXIT_REFUSED = 1
_EXIT_FAILED = 70


def exit_with_group(ending: Ending) -> NoReturn:
    """One line, and out: what computes may be stuck in a collective, which nothing can interrupt."""
    if ending.is_refusal:
        print(f"llm_verifier: rank {ending.rank}: {ending.reason}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(_EXIT_REFUSED)
    log_event(logger, logging.ERROR, "verifier group failed", rank=ending.rank, reason=ending.reason)
    os._exit(_EXIT_FAILED)


@contextmanager
def lead(
    seat: Seat,
    settings: VerifierSettings,
    is_stopped: Callable[[], bool],
    on_leaving: Callable[[], None],
    on_end: OnEnd = exit_with_group,
) -> Iterator[GroupDecoder]:
    """Rank 0: the whole group's decoder, for the body. All ranks are loaded; leaving ends them.

    Raises ConfigError (this rank cannot start) and GroupFailed (the group was not complete in time, or stopped).
    """
    store = open_store(seat, 0, settings.rendezvous_timeout_s)
    wires = gather_ranks(seat, facts(settings), _patience(settings, is_stopped), store.port)
    activity = Activity(settings.group_timeout_s)
    watch = LeaderWatch(wires, activity, settings.group_timeout_s, on_end, on_leaving)
    try:
        collectives = _connected(seat, store, settings, activity, watch)
        decoder = _load(seat, settings, collectives)
        _log_ready(seat, {0: describe(decoder)} | watch.wait_ready(is_stopped))
        yield GroupDecoder(decoder, collectives, watch)
        watch.stop()
        collectives.close()
    except Unavailable:  # the group has failed and all know, or was stopped: a peaceful end
        raise
    except ConfigError as error:
        watch.abandon(str(error), is_refusal=True)
        raise
    except Exception as error:
        watch.abandon(f"failed: {type(error).__name__}: {error}", is_refusal=False)
        raise
    finally:
        watch.stop()


class Follower:
    """Another rank's whole life. `run` in one thread; `leave` from another asks rank 0 to end the group in peace."""

    def __init__(self, seat: Seat, settings: VerifierSettings, on_end: OnEnd = exit_with_group) -> None:
        self._seat = seat
        self._settings = settings
        self._on_end = on_end
        self._watch: FollowerWatch | None = None
        self._is_leaving = False

    def run(self) -> None:
        """Returns when rank 0 has ended the group in peace. Raises ConfigError and GroupFailed as `lead` does."""
        seat, timeout_s = self._seat, self._settings.group_timeout_s
        patience = _patience(self._settings, lambda: self._is_leaving)
        wire, store_port = join_ranks(seat, facts(self._settings), patience)
        activity = Activity(timeout_s)
        watch = self._watch = FollowerWatch(seat.rank, wire, activity, timeout_s, self._on_end)
        if self._is_leaving:  # asked while the watch was not there to be told
            watch.tell_leaving()
        try:
            store = open_store(seat, store_port, timeout_s)
            collectives = _connected(seat, store, self._settings, activity, watch)
            decoder = self._loaded(collectives, watch)
            watch.tell_ready(describe(decoder))
            follow(decoder, collectives, watch)
            collectives.close()
        finally:
            watch.close()

    def leave(self) -> None:
        """End, with the whole group."""
        self._is_leaving = True
        if self._watch is not None:
            self._watch.tell_leaving()

    def _loaded(self, collectives: Collectives, watch: FollowerWatch) -> Decoder:
        try:
            return _load(self._seat, self._settings, collectives)
        except ConfigError as error:
            watch.fail("refused", str(error))
        except Exception as error:
            watch.fail("failed", f"failed: {type(error).__name__}: {error}")


def describe(decoder: Decoder) -> dict[str, int]:
    """What a rank tells of its part."""
    return {"num_layers": decoder.num_layers, "weight_bytes": decoder.weight_bytes}


def hardware(settings: VerifierSettings, rank: int) -> Hardware:
    """What a rank runs on; ranks on one machine with several CUDA devices take one each. Raises ConfigError."""
    device = choose_device(settings.device)
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
    return Hardware(
        device,
        settings.attention,
        settings.block_len,
        settings.batch_invariant,
        settings.offload,
        settings.offload_resident_layers,
    )


def _connected(
    seat: Seat, store: Store, settings: VerifierSettings, activity: Activity, watch: LeaderWatch | FollowerWatch
) -> Collectives:
    try:
        device = torch.device(hardware(settings, seat.rank).device)
        return connect(seat, store, device, activity)
    except CollectiveFailed as error:
        watch.fail(error.kind, str(error))


def _load(seat: Seat, settings: VerifierSettings, collectives: Collectives) -> Decoder:
    on = hardware(settings, seat.rank)
    return load_decoder(settings.model, dtype=settings.dtype, on=on, place=seat.place, links=collectives.links)


def _patience(settings: VerifierSettings, is_stopped: Callable[[], bool]) -> Patience:
    return Patience(settings.rendezvous_timeout_s, settings.group_timeout_s, is_stopped)


def _log_ready(seat: Seat, ranks: dict[int, dict[str, int]]) -> None:
    log_event(
        logger,
        logging.INFO,
        "verifier group ready",
        tensor_parallel_size=seat.tp_size,
        pipeline_parallel_size=seat.pp_size,
        layers="+".join(str(ranks[rank]["num_layers"]) for rank in range(0, seat.size, seat.tp_size)),
        weight_bytes=",".join(str(ranks[rank]["weight_bytes"]) for rank in range(seat.size)),
    )
