"""A group of real processes: the answers of one process, and one fate for all. Rank 0 is this process."""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from subprocess import Popen

import numpy as np
import pytest
import torch

from llm_verifier.engine import Engine
from llm_verifier.group.fate import Ending
from llm_verifier.group.member import describe
from llm_verifier.group.pipeline import micro_batches
from llm_verifier.group.seat import place_of
from llm_verifier.group.testing import RunningGroup, ended, reserved_port, running_group, start_rank
from treecore.errors import ConfigError, GroupFailed
from treecore.messages import RequestId, VerifyItem, VerifyRequest, WorkerId
from treecore.model.batch import ForwardBatch
from treecore.model.costs import measure_costs
from treecore.model.decoder import Decoder
from treecore.model.held import HeldRequests
from treecore.model.load import expected_shapes, load_decoder, open_checkpoint
from treecore.model.sequence import SequenceCache
from treecore.params import SamplingParams, Seed
from treecore.testing.tiny import VOCAB_SIZE, save_random_llama

NUM_SLOTS, BLOCK_LEN = 1024, 16
PROMPTS = {"a": [5, 6, 7], "b": list(range(20, 90)), "c": [9] * 33}
GONE = "is gone: its connection has closed"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers: they do not divide by two stages."""
    return save_random_llama(tmp_path_factory.mktemp("group") / "tiny", num_layers=3, seed=7)


@pytest.fixture(scope="module")
def whole(model: Path) -> Decoder:
    """The same model in one process."""
    return load_decoder(model, dtype="float32")


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2), (3, 1)])
def test_a_group_is_one_decoder(model: Path, whole: Decoder, tp_size: int, pp_size: int) -> None:
    """The logits and tokens of one process; it ends in peace, every rank with exit status 0."""
    with running_group(model, tp_size, pp_size) as group:
        assert_tokens_of_many_requests(group, whole)
        assert_logits(group, whole)
        assert_chunks_give_no_logits(group)
    assert [status for status, _ in group.exits] == [0] * len(group.others)
    assert group.endings == []


def test_a_rank_without_a_broker_answers_probes(model: Path) -> None:
    """It has started and is ready once its part is loaded; its page tells of the process."""
    with reserved_port() as port, running_group(model, 2, 1, "--operations-port", str(port)) as group:
        assert group.endings == []
        give_up_at = time.monotonic() + 10
        while fetched(port, "/readyz")[0] != 200:
            assert time.monotonic() < give_up_at
        assert [fetched(port, path)[0] for path in ("/startupz", "/livez")] == [200, 200]
        assert "espalier_process_cpu_seconds_total" in fetched(port, "/metrics")[1]


def fetched(port: int, path: str) -> tuple[int, str]:
    """Status and body of an operations port."""
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def item(request_id: str, tokens: list[int], start: int, drafts: list[int], parents: list[int]) -> VerifyItem:
    """One request's part of a step; sampled, so that a difference of any logit would show."""
    params = SamplingParams(0.8, 0, 0.95, Seed(len(request_id))) if start == 0 else None
    sent = np.array(tokens[start:], np.int32)
    tree = np.array(drafts, np.int32), np.array(parents, np.int32)
    return VerifyItem(RequestId(request_id), 0, start, sent, params, *tree, True)


def answers(engine: Engine, *items: VerifyItem) -> list[list[int]]:
    """The LLM's token behind every node."""
    reply = engine.step(VerifyRequest("me", (), items))
    assert not reply.refused
    return [verified.tokens.tolist() for verified in reply.items]


def incremental(whole: Decoder, prompt: list[int], num_tokens: int, request_id: str) -> list[int]:
    """What one process makes of the prompt, token by token."""
    engine = Engine(WorkerId("w"), HeldRequests(whole, NUM_SLOTS // BLOCK_LEN, BLOCK_LEN), VOCAB_SIZE)
    tokens, start = list(prompt), 0
    for _ in range(num_tokens):
        held, start = start, len(tokens)
        tokens += answers(engine, item(request_id, tokens, held, [], []))[0]
    return tokens


def assert_tokens_of_many_requests(group: RunningGroup, whole: Decoder) -> None:
    """Each step has a decoy before the right path: accepted rows are moved at every rank, and steps build on them."""
    wanted = {name: incremental(whole, prompt, 13, name) for name, prompt in PROMPTS.items()}
    held = HeldRequests(group.decoder, NUM_SLOTS // BLOCK_LEN, BLOCK_LEN)
    assert len(measure_costs(held, "group", lambda: 0.0)) == 7
    engine = Engine(WorkerId("g"), held, VOCAB_SIZE)
    for step in range(4):
        items = []
        for name, text in wanted.items():
            length = len(PROMPTS[name]) + 3 * step
            start = length - 3 if step else 0
            right = text[length : length + 2]
            items.append(item(name, text[:length], start, [right[0] ^ 1, *right], [0, 0, 2]))
        for name, told in zip(wanted, answers(engine, *items), strict=True):
            length = len(PROMPTS[name]) + 3 * step
            assert [told[0], told[2], told[3]] == wanted[name][length : length + 3]


def assert_logits(group: RunningGroup, whole: Decoder) -> None:
    """Of a prompt with a tree and of a short request, in one batch that is cut into micro-batches within a segment."""
    found = []
    for decoder in (group.decoder, whole):
        pool = decoder.new_pool(NUM_SLOTS)  # type: ignore[attr-defined]
        cache = SequenceCache(pool, BLOCK_LEN)
        cache.advance("long", 0, np.arange(100))
        cache.extend("long", [1, 2, 3, 4], [0, 0, 1, 3])
        cache.advance("short", 0, [1, 2])
        batch = ForwardBatch.from_segments([cache.next_segment("long"), cache.next_segment("short")])
        found.append(decoder.forward(batch, pool))  # type: ignore[attr-defined]
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=0)


def assert_chunks_give_no_logits(group: RunningGroup) -> None:
    """A chunk of a prompt."""
    pool = group.decoder.new_pool(NUM_SLOTS)
    cache = SequenceCache(pool, BLOCK_LEN)
    cache.advance("r", 0, np.arange(150))
    chunk = cache.next_segment("r", 64)
    assert group.decoder.forward(ForwardBatch.from_segments([chunk]), pool).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [1, 8, 15, 16, 150])
def test_micro_batches_are_equal_and_not_small(whole: Decoder, num_rows: int, num_stages: int) -> None:
    """As many as stages, unless they had fewer than 8 rows."""
    cache = SequenceCache(whole.new_pool(NUM_SLOTS), BLOCK_LEN)
    cache.advance("r", 0, np.arange(num_rows))
    batch = ForwardBatch.from_segments([cache.next_segment("r")])
    sizes = [len(piece.tokens) for piece in micro_batches(batch, num_stages, piece_rows=8)]
    assert sum(sizes) == num_rows
    assert len(sizes) == max(1, min(num_stages, num_rows // 8))
    assert max(sizes) - min(sizes) <= 1


def assert_named(exit: tuple[int, list[str]], rank: int, reason: str) -> None:  # noqa: A002
    """The process ended with an error, and one line that names the rank."""
    status, lines = exit
    assert status == 70
    assert [line for line in lines if "ERROR" in line] == lines[-1:], lines
    assert f"ERROR llm_verifier verifier group failed rank={rank} reason={reason}" in lines[-1]


def use(group: RunningGroup) -> None:
    """Forwards without end."""
    pool = group.decoder.new_pool(NUM_SLOTS)
    cache = SequenceCache(pool, BLOCK_LEN)
    cache.advance("r", 0, np.arange(150))
    batch = ForwardBatch.from_segments([cache.next_segment("r")])
    while True:
        group.decoder.forward(batch, pool)


def seconds_until(happened: Iterator[bool]) -> float:
    """How long it takes; what bounds it is the test's own timeout."""
    started = time.monotonic()
    while not next(happened):
        time.sleep(0.01)
    return time.monotonic() - started


@pytest.mark.parametrize("is_idle", [True, False])
def test_kill_9_takes_everyone_down_at_once(model: Path, is_idle: bool) -> None:
    """Within 5 s, whether the group computes or waits; each survivor names the rank that was killed."""
    with pytest.raises(GroupFailed, match=f"rank 2 {GONE}"), running_group(model, 1, 3) as group:  # noqa: PT012
        pids = [process.pid for process in group.others]
        if is_idle:
            os.kill(pids[1], signal.SIGKILL)
        else:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(pids[1], signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        started = time.monotonic()
        if is_idle:
            assert seconds_until(iter(lambda: bool(group.endings), None)) < 5
        use(group)
    assert time.monotonic() - started < 5.3
    assert group.endings == [Ending(2, GONE)]
    assert_named(group.exits[0], 2, GONE)


def test_a_rank_that_hangs_is_named_when_the_deadline_has_passed(model: Path) -> None:
    """SIGSTOP: its connections stay open. The timeout of a collective and of silence is the setting's."""
    with pytest.raises(GroupFailed, match="rank 2 has"), running_group(model, 1, 3, "--group-timeout-s", "2") as group:  # noqa: PT012
        os.kill(group.others[1].pid, signal.SIGSTOP)
        try:
            use(group)
        finally:
            os.kill(group.others[1].pid, signal.SIGCONT)
    assert group.endings[0].rank == 2
    assert_named(group.exits[0], 2, group.endings[0].reason)


def test_a_rank_that_cannot_load_refuses_for_all(model: Path) -> None:
    """Four stages for three layers: rank 0 raises its own ConfigError, the others leave with one line, status 1."""
    with pytest.raises(ConfigError, match="4 pipeline stages for 3 layers"), running_group(model, 1, 4) as group:
        raise AssertionError(group)


@contextmanager
def two_stages(model: Path) -> Iterator[tuple[Popen[str], Popen[str]]]:
    """Two ranks as processes, ready, with a broker that never comes."""
    flags = ["--pipeline-parallel-size", "2", "--nats-url", "nats://127.0.0.1:1"]
    with reserved_port() as port:
        leader, follower = (start_rank(rank, port, model, *flags) for rank in (0, 1))
        assert leader.stderr is not None
        assert any("verifier group ready" in line for line in leader.stderr)
        yield leader, follower


def test_rank_0_killed(model: Path) -> None:
    """The others go within 5 s and say who is gone. Rank 0 is a process here, which waits for its broker."""
    with two_stages(model) as (leader, follower):
        leader.kill()
        killed_at = time.monotonic()
        assert_named(ended(follower), 0, GONE)
        assert time.monotonic() - killed_at < 5
        leader.communicate()


def test_a_stop_of_any_rank_ends_the_group_in_peace(model: Path) -> None:
    """SIGTERM to a follower: rank 0 ends the group, and both exit with status 0."""
    with two_stages(model) as (leader, follower):
        follower.terminate()
        assert [ended(process)[0] for process in (leader, follower)] == [0, 0]


def test_other_settings_are_refused_by_name(model: Path) -> None:
    """A rank of another precision leaves with one line and exit status 1; the group waits for the right one."""
    flags = ["--pipeline-parallel-size", "2"]
    with reserved_port() as port:
        wrong = start_rank(1, port, model, *flags, "--dtype", "bfloat16", "--rendezvous-timeout-s", "60")
        leader = start_rank(0, port, model, *flags, "--rendezvous-timeout-s", "60")
        status, lines = ended(wrong)
        assert status == 1
        assert lines == [
            "llm_verifier: rank 1 does not belong to this group: dtype is 'bfloat16' there and 'float32' at rank 0"
        ]
        leader.terminate()
        assert ended(leader)[0] == 0


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_ranks_tell_what_they_have(model: Path, tp_size: int, pp_size: int) -> None:
    """All layers, each in one stage; all weights once, and twice only what each rank of a stage needs whole."""
    places = [place_of(rank, tp_size, pp_size) for rank in range(tp_size * pp_size)]
    told = [describe(load_decoder(model, dtype="float32", place=place)) for place in places]
    assert sum(each["num_layers"] for each in told) == 3 * tp_size
    stored = 4 * sum(math.prod(shape) for shape in expected_shapes(open_checkpoint(model)[0]).values())
    norms = 4 * 64 * (2 * 3 + 1)
    assert sum(each["weight_bytes"] for each in told) == stored + (tp_size - 1) * norms
