"""A verifier group serves one manager at a time, whoever asks and however late a message comes."""

from pathlib import Path

import numpy as np
import pytest

from llm_verifier.engine import Engine
from llm_verifier.lease import Lease, Tenancy
from treecore.messages import RequestId, VerifyItem, VerifyReply, VerifyRequest, WorkerId
from treecore.model.held import HeldRequests
from treecore.model.load import load_decoder
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.sessions import LEASE_S
from treecore.testing.tiny import save_random_llama

GREEDY = SamplingParams(0.0, 0, 1.0, Seed(0))


class Clock:
    """Time, by hand."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """The group's clock."""
    return Clock()


@pytest.fixture
def tenancy(clock: Clock, tmp_path: Path) -> Tenancy:
    """A group with a tiny model."""
    decoder = load_decoder(save_random_llama(tmp_path, num_layers=1, seed=0), dtype="float32")
    held = HeldRequests(decoder, 16, 4)
    return Tenancy(Engine(WorkerId("v"), held, decoder.spec.vocab_size), held, Lease(clock))


def step(tenancy: Tenancy, session: str, *request_ids: str, leaves: bool = False) -> VerifyReply:
    """One step with a short prompt for each request."""
    none = np.empty(0, np.int32)
    items = [
        VerifyItem(RequestId(request_id), 0, 0, np.array([1, 2, 3], np.int32), GREEDY, none, none, wants_token=True)
        for request_id in request_ids
    ]
    return tenancy.step(VerifyRequest(session, (), tuple(items), leaves))


def test_the_first_that_asks_has_it(tenancy: Tenancy) -> None:
    """It is served, in any session; anybody else is told who has it, and changes nothing."""
    assert step(tenancy, "a.1", "x").holder == "a"
    refused = step(tenancy, "b.1", "y")
    assert (refused.holder, refused.items, refused.refused) == ("a", (), ())
    again = step(tenancy, "a.1", "x")
    assert len(again.items) == 1
    assert again.blocks.used == 1
    assert step(tenancy, "a.2").blocks.used == 0


def test_silence_ends_it(tenancy: Tenancy, clock: Clock) -> None:
    """Exactly behind the limit; then the old holder is refused, and nothing of it is held."""
    step(tenancy, "a.1", "x")
    clock.now_s += LEASE_S - 0.01
    assert step(tenancy, "b.1").holder == "a"
    clock.now_s += 0.02
    taken = step(tenancy, "b.1", "y")
    assert taken.holder == "b"
    assert taken.blocks.used == 1
    assert step(tenancy, "a.1", "x").holder == "b"


def test_a_long_step_is_no_silence(clock: Clock) -> None:
    """While a step is computed the group is taken, however long that is; silence begins when it ends."""
    lease = Lease(clock)
    assert lease.grant("a")
    clock.now_s += 100 * LEASE_S
    assert lease.holder == "a"
    assert not lease.grant("b")
    lease.renew()
    clock.now_s += LEASE_S + 0.01
    assert lease.holder == ""
    assert lease.grant("b")


def test_an_empty_message_keeps_it(tenancy: Tenancy, clock: Clock) -> None:
    """A manager without work says so now and then."""
    step(tenancy, "a.1", "x")
    for _ in range(5):
        clock.now_s += LEASE_S * 0.9
        assert step(tenancy, "a.1").holder == "a"
    assert step(tenancy, "b.1").holder == "a"


def test_who_leaves_gives_it_up_at_once(tenancy: Tenancy) -> None:
    """Nothing is held, nobody has it, and the next that asks does."""
    step(tenancy, "a.1", "x")
    left = step(tenancy, "a.1", leaves=True)
    assert (left.holder, left.blocks.used) == ("", 0)
    assert step(tenancy, "b.1", "y").holder == "b"
    assert step(tenancy, "a.1", leaves=True).holder == "b", "who does not have it cannot give it up"
