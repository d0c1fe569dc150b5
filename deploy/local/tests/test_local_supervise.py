"""The supervisor with real child processes, and its restart policy."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier_local.child import Child
from espalier_local.supervise import ChildFailed, RestartPolicy, Supervisor

FAST = RestartPolicy(first_delay_s=0.001, max_delay_s=0.01, follow_s=0.05)
RUNS = "import signal; print('up'); signal.pause()"
SAYS_BYE = """
import signal, sys
def bye(*_):
    print('bye')
    sys.exit(0)
signal.signal(signal.SIGTERM, bye)
print('up')
while True:
    signal.pause()
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up')\nwhile True: signal.pause()"


@asynccontextmanager
async def supervisor(heard, grace_s=10.0, policy=FAST) -> AsyncIterator[Supervisor]:
    """A supervisor that is stopped behind the test."""
    kept = Supervisor(heard, policy, grace_s)
    try:
        yield kept
    finally:
        await kept.stop()


@settings(deadline=None)
@given(st.lists(st.floats(0, 1000), min_size=1, max_size=12).map(sorted))
def test_the_delay_doubles_up_to_its_cap_or_there_is_none(deaths: list[float]) -> None:
    """Within bounds while fewer than max_deaths fall into the window; None exactly from then on."""
    policy = RestartPolicy()
    now = deaths[-1]
    recent = [death for death in deaths if now - death <= policy.window_s]
    delay_s = policy.delay_s(deaths, now)
    if len(recent) >= policy.max_deaths:
        assert delay_s is None
    else:
        assert delay_s == min(0.2 * 2 ** (len(recent) - 1), 5.0)


async def test_a_killed_child_is_started_again(heard, child_of) -> None:
    """After kill -9 there is a new process that does the same work."""
    async with supervisor(heard) as kept:
        await kept.start(child_of("worker", RUNS))
        await heard.when(lambda h: h.of("worker") == ["up"])
        first = kept.pid("worker")
        os.kill(first, signal.SIGKILL)
        await heard.when(lambda h: h.of("worker") == ["up", "up"])
        assert kept.pid("worker") != first
        assert "killed by signal 9" in heard.of("espalier")[0]


async def test_a_group_lives_and_dies_together(heard, child_of) -> None:
    """Kill -9 of the second: the others are ended, also one that does not go by itself, and all start again."""
    async with supervisor(heard) as kept:
        await kept.start(*[child_of(name, RUNS) for name in "abc"])
        assert kept.names() == ("a", "b", "c")
        await heard.when(lambda h: len(h.lines) == 3)
        first = [kept.pid(name) for name in "abc"]
        os.kill(first[1], signal.SIGKILL)
        await heard.when(lambda h: all(h.of(name) == ["up", "up"] for name in "abc"))
        assert not {*first} & {kept.pid(name) for name in "abc"}
        assert heard.of("espalier") == ["a died (killed by signal 9: up); starting it again in 0.0 s"]


async def test_a_refusal_of_one_is_the_groups(heard, child_of) -> None:
    """Its own line is the message, whoever ends at the same time."""
    refuses = "import sys; print('b: tensor x is missing', file=sys.stderr); sys.exit(1)"
    async with supervisor(heard) as kept:
        await kept.start(child_of("a", RUNS), child_of("b", refuses))
        with pytest.raises(ChildFailed, match=r"^b: tensor x is missing$"):
            async with asyncio.timeout(20):
                await kept.failure()


async def test_a_child_that_keeps_dying_is_given_up(heard, child_of) -> None:
    """Five deaths within a minute: one clear line, no sixth life."""
    async with supervisor(heard) as kept:
        await kept.start(child_of("worker", "import sys; print('no luck'); sys.exit(70)"))
        with pytest.raises(ChildFailed, match=r"^worker died 5 times within 60 s, last with exit status 70: no luck$"):
            await asyncio.wait_for(kept.failure(), 20)
    assert heard.of("worker") == ["no luck"] * 5


async def test_deaths_long_ago_are_forgotten(heard, child_of) -> None:
    """With the clock a minute on at each death, twelve deaths are no reason to give up."""
    now = iter(range(0, 100_000, 61))
    kept = Supervisor(heard, FAST, clock=lambda: float(next(now)))
    await kept.start(child_of("worker", "print('up'); raise SystemExit(70)"))
    await heard.when(lambda h: len(h.of("worker")) >= 12)
    await kept.stop()


async def test_a_refusal_is_final_and_its_line_is_the_message(heard, child_of) -> None:
    """Exit status 1 before it was ready: the child's own line, said once, and no second try."""
    code = "import sys; print('loading'); print('worker: tensor x is missing', file=sys.stderr); sys.exit(1)"
    async with supervisor(heard) as kept:
        await kept.start(child_of("worker", code))
        with pytest.raises(ChildFailed, match=r"^worker: tensor x is missing$"):
            await asyncio.wait_for(kept.failure(), 20)
    assert heard.of("worker") == ["loading"]


async def test_exit_status_1_after_being_ready_is_a_death_like_any_other(heard, child_of) -> None:
    """A child that has worked is started again."""
    async with supervisor(heard) as kept:
        await kept.start(child_of("worker", "import sys; print('up'); sys.stdin.read(); sys.exit(1)"))
        kept.mark_ready("worker")
        await heard.when(lambda h: h.of("worker")[:2] == ["up", "up"])


async def test_children_stop_in_reverse_order_of_their_start(heard, child_of) -> None:
    """Each has gone before the next is told to go."""
    async with supervisor(heard) as kept:
        for name in ("a", "b", "c"):
            await kept.start(child_of(name, SAYS_BYE))
        await heard.when(lambda h: len(h.lines) == 3)
    assert [name for name, line in heard.lines if line == "bye"] == ["c", "b", "a"]


async def test_a_child_that_ignores_sigterm_is_killed(heard, child_of, gone) -> None:
    """After the grace period, with its whole group."""
    async with supervisor(heard, grace_s=0.05) as kept:
        await kept.start(child_of("worker", STUBBORN))
        await heard.when(lambda h: h.of("worker") == ["up"])
        pid = kept.pid("worker")
    assert gone(pid)


async def test_a_group_that_ignores_sigterm_has_one_grace_period(heard, child_of, gone) -> None:
    """Not one for each of its children."""
    async with supervisor(heard, grace_s=1.0) as kept:
        await kept.start(*[child_of(name, STUBBORN) for name in "abcdef"])
        await heard.when(lambda h: len(h.lines) == 6)
        pids = [kept.pid(name) for name in "abcdef"]
        async with asyncio.timeout(5):
            await kept.stop()
    for pid in pids:
        assert gone(pid)


async def test_a_cancelled_stop_kills_at_once(heard, child_of, gone) -> None:
    """The second Ctrl-C does not wait for the grace period."""
    kept = Supervisor(heard, FAST, grace_s=1000)
    await kept.start(child_of("worker", STUBBORN))
    await heard.when(lambda h: h.of("worker") == ["up"])
    stopping = asyncio.create_task(kept.stop())
    await asyncio.wait({stopping}, timeout=0.05)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert gone(kept.pid("worker"))


async def test_what_a_dead_child_leaves_in_its_group_dies_too(heard, child_of, gone) -> None:
    """Half a group never lives on, and a pipe that it holds open does not hide the death."""
    code = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']).pid)"
    )
    child = await Child.spawn(child_of("worker", code), heard)
    assert (await asyncio.wait_for(child.wait(), 20)).code == 0
    assert gone(int(heard.of("worker")[0]))


async def test_a_program_that_does_not_exist_is_one_clear_error(heard) -> None:
    """No traceback from the depths of subprocess."""
    from espalier_local.child import ChildSpec  # noqa: PLC0415

    async with supervisor(heard) as kept:
        with pytest.raises(ChildFailed, match="worker cannot be started"):
            await kept.start(ChildSpec("worker", ("/no/such/program",), "worker"))


async def test_long_and_odd_output_is_handed_on_line_by_line(heard, child_of) -> None:
    """A megabyte without a newline, bytes that are no UTF-8, and a last line without an end."""
    code = r"import os; os.write(1, b'x' * 1_000_000 + b'\n\xff\n\nend')"
    child = await Child.spawn(child_of("worker", code), heard)
    assert (await asyncio.wait_for(child.wait(), 20)).line == "end"
    assert [len(line) for line in heard.of("worker")] == [1_000_000, 1, 3]


LAUNCHER = f"""
import asyncio, sys
from espalier_local.child import ChildSpec
from espalier_local.interrupts import run_until_signal
from espalier_local.supervise import Supervisor

def code(name):
    return {SAYS_BYE!r}

async def main():
    kept = Supervisor(lambda name, line: print(name, line, flush=True))
    try:
        for name in ("a", "b"):
            await kept.start(ChildSpec(name, (sys.executable, "-u", "-c", code(name)), name))
        print("pids", kept.pid("a"), kept.pid("b"), flush=True)
        await kept.failure()
    finally:
        await kept.stop()

sys.exit(run_until_signal(main))
"""


def start_launcher() -> tuple[subprocess.Popen[str], list[int]]:
    """A launcher with two children that run; returns it and their process ids."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pids, num_up = [], 0
    while len(pids) < 2 or num_up < 2:
        name, *words = launcher.stdout.readline().split()
        pids += map(int, words) if name == "pids" else []
        num_up += words == ["up"]
    return launcher, pids


def test_kill_9_of_the_launcher_leaves_no_orphans(gone) -> None:
    """The kernel ends the children, whatever became of the launcher."""
    launcher, pids = start_launcher()
    with launcher:
        launcher.kill()
        assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_children_in_order(gone, number) -> None:
    """Exit status 128 + signal, the children said goodbye, last started first, and no traceback."""
    launcher, pids = start_launcher()
    with launcher:
        launcher.send_signal(number)
        assert launcher.stdout is not None
        assert launcher.stdout.read().split("\n") == ["b bye", "a bye", ""]
        assert launcher.wait() == 128 + number
    assert all(gone(pid) for pid in pids)
