"""How ranks meet: any order, nobody twice, nobody who does not belong. Threads stand in for processes."""

import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from llm_verifier.group.fingerprint import checkpoint_digest, facts
from llm_verifier.group.forming import Facts, Patience, gather_ranks, join_ranks
from llm_verifier.group.seat import Seat
from llm_verifier.group.testing import reserved_port
from llm_verifier.group.wire import Wire
from llm_verifier.settings import VerifierSettings
from treecore.errors import ConfigError, GroupFailed
from treecore.testing.tiny import save_random_llama

FACTS = {"dtype": "float32", "version": "1"}
STORE_PORT = 4711
LONG = Patience(20, 20, lambda: False)


def lead(pool: ThreadPoolExecutor, port: int, size: int, patience: Patience = LONG) -> "Future[dict[int, Wire]]":
    """Rank 0 of a group of `size`."""
    return pool.submit(gather_ranks, Seat(0, size, 1, ("127.0.0.1", port)), FACTS, patience, STORE_PORT)


def join(
    pool: ThreadPoolExecutor, port: int, rank: int, facts: Facts = FACTS, patience: Patience = LONG
) -> "Future[tuple[Wire, int]]":
    """Another rank."""
    return pool.submit(join_ranks, Seat(rank, 64, 1, ("127.0.0.1", port)), facts, patience)


def close(wires: dict[int, Wire], *joined: "Future[tuple[Wire, int]]") -> None:
    """Leave nothing open."""
    for wire in [*wires.values(), *(each.result()[0] for each in joined)]:
        wire.close()


def connected(port: int) -> socket.socket:
    """To rank 0, once it listens."""
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_any_order(order: list[int]) -> None:
    """Whoever comes first waits for the others; all learn the store's port."""
    with reserved_port() as port, ThreadPoolExecutor(3) as pool:
        found = {rank: lead(pool, port, 3) if rank == 0 else join(pool, port, rank) for rank in order}
        wires = found.pop(0).result()
        assert sorted(wires) == [1, 2]
        assert [each.result()[1] for each in found.values()] == [STORE_PORT] * 2  # type: ignore[index]
        close(wires, *found.values())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rank", "theirs", "words"),
    [
        (1, {**FACTS, "dtype": "bfloat16"}, r"rank 1 .*: dtype is 'bfloat16' there and 'float32' at rank 0"),
        (1, {"version": "1"}, r"dtype is 'unknown' there"),
        (1, {**FACTS, "new": "x"}, r"new is 'x' there and 'unknown' at rank 0"),
        (9, FACTS, r"rank 9: the group has ranks 0 to 1"),
        (0, FACTS, r"rank 0: the group has"),
    ],
)
def test_who_does_not_belong_is_refused_and_the_group_forms_all_the_same(rank: int, theirs: Facts, words: str) -> None:
    """With a line that names the difference; rank 0 goes on waiting for the right one."""
    with reserved_port() as port, ThreadPoolExecutor(3) as pool:
        leader = lead(pool, port, 2)
        with pytest.raises(ConfigError, match=words):
            join(pool, port, rank, theirs).result()
        right = join(pool, port, 1)
        close(leader.result(), right)


def test_in_a_roll_out_a_new_rank_waits_for_the_new_leader() -> None:
    """It is sent away, not refused: a StatefulSet replaces the leader only while this rank lives."""
    new, sent_away = {**FACTS, "group_generation": "new"}, threading.Event()

    def is_stopped() -> bool:
        sent_away.set()
        return False

    with reserved_port() as port, ThreadPoolExecutor(2) as pool:
        old = lead(pool, port, 2, Patience(20, 20, sent_away.is_set))
        with closing(Wire(connected(port), 20)) as wire:
            wire.send("hello", 1, new)
            assert wire.receive().kind == "later"
        rank = join(pool, port, 1, new, Patience(20, 20, is_stopped))
        with pytest.raises(GroupFailed, match="missing ranks 1"):
            old.result()
        wires = gather_ranks(Seat(0, 2, 1, ("127.0.0.1", port)), new, LONG, STORE_PORT)
        close(wires, rank)


def test_a_rank_twice_is_refused() -> None:
    """The second one; the first stays."""
    with reserved_port() as port, ThreadPoolExecutor(4) as pool:
        leader = lead(pool, port, 3)
        twins = [join(pool, port, 1), join(pool, port, 1)]
        while not any(twin.done() for twin in twins):
            time.sleep(0.01)
        refused = next(twin for twin in twins if twin.done())
        with pytest.raises(ConfigError, match="rank 1 is taken"):
            refused.result()
        stayed = next(twin for twin in twins if twin is not refused)
        other = join(pool, port, 2)
        close(leader.result(), stayed, other)


def test_a_rank_that_went_away_while_others_are_missing_may_come_again() -> None:
    """A process that died and was started again is no twin."""
    with reserved_port() as port, ThreadPoolExecutor(4) as pool:
        leader = lead(pool, port, 3)
        first = Wire(connected(port), 20)
        first.send("hello", 1, FACTS)
        first.close()
        again, other = join(pool, port, 1), join(pool, port, 2)
        close(leader.result(), again, other)


def test_strangers_do_not_disturb() -> None:
    """HTTP, silence that ends, and an oversized frame at the port."""
    with reserved_port() as port, ThreadPoolExecutor(2) as pool:
        leader = lead(pool, port, 2)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"", b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1", b"\x02\0\0\0\x91\x01"):
            with connected(port) as stranger:
                stranger.sendall(words)
        right = join(pool, port, 1)
        close(leader.result(), right)


def test_the_wait_is_bounded_and_says_who_is_missing() -> None:
    """Rank 0 names them; the others learn that they are not a group."""
    short = Patience(0.5, 20, lambda: False)
    with reserved_port() as port, ThreadPoolExecutor(2) as pool:
        leader = lead(pool, port, 4, Patience(1, 20, lambda: False))
        other = join(pool, port, 2, patience=short)
        with pytest.raises(GroupFailed, match=r"within 1 s: missing ranks 1, "):
            leader.result()
        with pytest.raises(GroupFailed, match=r"within 0\.5 s"):
            other.result()


def test_a_stop_ends_the_wait() -> None:
    """On both sides."""
    stopped = Patience(1000, 20, lambda: True)
    with reserved_port() as port, ThreadPoolExecutor(2) as pool:
        for waiting in (lead(pool, port, 2, stopped), join(pool, port, 1, patience=stopped)):
            with pytest.raises(GroupFailed):
                waiting.result(20)


def test_the_port_in_use_is_named(tmp_path: Path) -> None:
    """A setting is wrong, or another leader runs there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--rendezvous 127.0.0.1:{port}: cannot listen there"):
            gather_ranks(Seat(0, 2, 1, ("127.0.0.1", port)), FACTS, LONG, STORE_PORT)


def test_facts_tell_checkpoints_settings_and_generations_apart(tmp_path: Path) -> None:
    """Weights of the same shapes, one setting, one revision; what a rank has to itself does not matter."""
    one, two = (save_random_llama(tmp_path / str(seed), num_layers=1, seed=seed) for seed in (0, 1))
    same = save_random_llama(tmp_path / "same", num_layers=1, seed=0)
    base = VerifierSettings(model=one)
    assert checkpoint_digest(one) != checkpoint_digest(two)
    assert facts(base) == facts(VerifierSettings(model=same, rank=3, log_level="debug", group_timeout_s=5))
    for changed in ({"dtype": "bfloat16"}, {"kv_tokens": 64}, {"block_len": 4}, {"group_generation": "b"}):
        assert facts(base) != facts(VerifierSettings(model=one, **changed))


def test_large_weights_are_sampled_at_both_ends(tmp_path: Path) -> None:
    """A change in the first and in the last bytes shows; only samples are read."""
    file = tmp_path / "model.safetensors"
    weights = bytearray(1_000_000)
    digests = set()
    for where in (None, 0, 999_999, 500_000):
        if where is not None:
            weights[where] ^= 1
        file.write_bytes(weights)
        digests.add(checkpoint_digest(tmp_path))
    assert len(digests) >= 3
