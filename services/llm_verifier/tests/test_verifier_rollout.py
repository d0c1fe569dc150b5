"""A StatefulSet's update of a group of two pods, step by step, as its controller and the kubelet do it."""

import re
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from urllib.error import URLError
from urllib.request import urlopen

from llm_verifier.group.testing import ended, reserved_port, start_rank
from treecore.testing.tiny import save_random_llama


def said(process: "Popen[str]", words: str) -> str:
    """The line with these words, once the process says it; fails if it ends before."""
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return line
    raise AssertionError(f"it ended without saying {words!r}")


def wait_ready(process: "Popen[str]") -> None:
    """Until its probe says so; fails if it ends before."""
    port = re.search(r"port=(\d+)", said(process, "operations port open"))
    assert port is not None
    while process.poll() is None:
        with suppress(URLError), urlopen(f"http://127.0.0.1:{port[1]}/readyz", timeout=5) as response:
            assert response.status == 200
            return
    raise AssertionError("it ended before it was ready")


def test_an_update_replaces_the_group(tmp_path: Path) -> None:
    """From the last pod to the first, which follows only when the last one is ready."""
    model = save_random_llama(tmp_path / "tiny", num_layers=2, seed=0)
    with reserved_port() as port:

        def start(rank: int, generation: str) -> "Popen[str]":
            sizes = ("--pipeline-parallel-size", "2", "--rendezvous-timeout-s", "120")
            flags = (*sizes, "--group-generation", generation, "--operations-port", "0")
            return start_rank(rank, port, model, *flags)

        first, last = start(0, "old"), start(1, "old")
        said(first, "verifier group ready")
        last.terminate()  # the controller deletes the last pod: its group ends in peace
        assert [ended(first)[0], ended(last)[0]] == [0, 0]

        first, last = start(0, "old"), start(1, "new")  # the kubelet restarts one, the controller makes the other anew
        wait_ready(last)
        first.terminate()  # so the controller goes on
        ended(first)

        first = start(0, "new")
        said(first, "verifier group ready")
        first.terminate()
        assert [ended(first)[0], ended(last)[0]] == [0, 0]
