"""A lifeline ends the waits that hold it, at once, and nothing else."""

import asyncio

import pytest

from treecore.errors import Unavailable
from treecore.service.lifeline import Lifeline


async def hold(lifeline: Lifeline, begun: asyncio.Event, until: asyncio.Event) -> None:
    """Hold it until `until`."""
    async with lifeline.hold():
        begun.set()
        await until.wait()


async def test_all_waits_end_when_it_is_cut() -> None:
    """Each with Unavailable, long before what they wait for; cutting it twice is fine."""
    lifeline, never = Lifeline("it is gone"), asyncio.Event()
    begun = [asyncio.Event(), asyncio.Event()]
    waits = [asyncio.create_task(hold(lifeline, event, never)) for event in begun]
    for event in begun:
        await event.wait()
    lifeline.cut()
    lifeline.cut()
    async with asyncio.timeout(10):
        outcomes = await asyncio.gather(*waits, return_exceptions=True)
    assert [(type(outcome), str(outcome)) for outcome in outcomes] == [(Unavailable, "it is gone")] * 2


async def test_a_cut_one_cannot_be_held_until_it_is_mended() -> None:
    """The body does not even begin."""
    lifeline, done = Lifeline("it is gone"), asyncio.Event()
    done.set()
    lifeline.cut()
    with pytest.raises(Unavailable, match="gone"):
        await hold(lifeline, asyncio.Event(), done)
    lifeline.mend()
    await hold(lifeline, asyncio.Event(), done)


async def test_what_has_ended_is_not_touched() -> None:
    """A task that held it once goes on undisturbed."""
    lifeline, done = Lifeline("it is gone"), asyncio.Event()
    done.set()
    await hold(lifeline, asyncio.Event(), done)
    lifeline.cut()
    await asyncio.wait_for(done.wait(), 10)


async def test_the_bodys_own_timeout_and_cancellation_stay_what_they_are() -> None:
    """Only a cut becomes Unavailable."""
    lifeline, never = Lifeline("it is gone"), asyncio.Event()
    with pytest.raises(TimeoutError):
        async with lifeline.hold():
            await asyncio.wait_for(never.wait(), 0.001)
    begun = asyncio.Event()
    waiting = asyncio.create_task(hold(lifeline, begun, never))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
