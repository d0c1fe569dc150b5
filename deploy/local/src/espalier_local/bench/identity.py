"""`espalier bench identity`: speculation on == off == transformers, token for token.

Greedy answers are compared with transformers' `generate` too; sampled ones (a seed each) between on and off.
"""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from tqdm import tqdm

from espalier_local.bench.peer import TransformersPeer
from espalier_local.bench.prompts import read_prompts
from espalier_local.client import Ask, complete, served_model
from espalier_local.gateway import gateway
from espalier_local.interrupts import run_until_signal
from espalier_local.options import add_system_options, positive, system_config
from espalier_local.output import say
from espalier_local.system import SystemConfig


@dataclass(frozen=True, slots=True)
class Comparison:
    """Which prompts two ways of decoding answered differently; `first` is the first token index that differs."""

    name: str
    num_prompts: int
    num_tokens: int
    differing: tuple[tuple[int, int], ...]

    def line(self) -> str:
        """One line of the report."""
        same = self.num_prompts - len(self.differing)
        where = "".join(f"; prompt {prompt} from token {first}" for prompt, first in self.differing[:5])
        return f"{self.name:40} {same}/{self.num_prompts} prompts identical, {self.num_tokens} tokens{where}"


def add_parser(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the check."""
    parser = benches.add_parser("identity", help="speculation changes no token", description=__doc__)
    add = parser.add_argument
    add("--prompts", type=Path, nargs="+", help="files of JSON lines with a `prompt` each (default: six of our own)")
    add(
        "--num-prompts", type=positive, default=100, help="how many of them, taken from the files in turn (default 100)"
    )
    add("--max-tokens", type=positive, default=64)
    add("--temperature", type=float, default=0.8, help="of the sampled half (default 0.8)")
    add("--no-transformers", action="store_true", help="compare on with off only")
    add_system_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare and print; exit status 1 if a single token differs."""
    config = system_config(args)
    prompts = read_prompts(args.prompts or (), args.num_prompts)
    greedy = [Ask(prompt, max_tokens=args.max_tokens, chat=True) for prompt in prompts]
    sampled = [replace(ask, temperature=args.temperature, seed=idx) for idx, ask in enumerate(greedy)]
    peer = None if args.no_transformers else TransformersPeer(config.model.directory, "float32", config.threads)
    return run_until_signal(lambda: _run(config, greedy, sampled, peer))


async def _run(config: SystemConfig, greedy: list[Ask], sampled: list[Ask], peer: TransformersPeer | None) -> int:
    num_runs = len(greedy) * (4 + (peer is not None))
    with tqdm(total=num_runs, unit="answer", disable=None) as bar:
        async with gateway(None, config) as client:
            answers = [
                await _answers(client, asks, speculation, bar.update)
                for asks in (greedy, sampled)
                for speculation in (True, False)
            ]
        on, off, sampled_on, sampled_off = answers
        found = [
            compare("greedy: speculation on = off", on, off),
            compare(f"temperature {sampled[0].temperature}: speculation on = off", sampled_on, sampled_off),
        ]
        if peer is not None:
            theirs = await asyncio.to_thread(_peer_answers, peer, greedy, bar.update)
            found.append(compare("greedy: speculation on = transformers", on, theirs))
    for comparison in found:
        say(comparison.line())
    return 1 if any(comparison.differing for comparison in found) else 0


async def _answers(
    client: httpx.AsyncClient, asks: Sequence[Ask], speculation: bool, on_answer: Callable[[], object]
) -> list[tuple[int, ...]]:
    model = await served_model(client)
    answers = []
    for ask in asks:
        answers.append((await complete(client, model, replace(ask, speculation=speculation))).token_ids)
        on_answer()
    return answers


def _peer_answers(
    peer: TransformersPeer, asks: Sequence[Ask], on_answer: Callable[[], object]
) -> list[tuple[int, ...]]:
    answers = []
    for ask in asks:
        answers.append(peer.generate(ask.prompt, ask.max_tokens).token_ids)
        on_answer()
    return answers


def compare(name: str, ours: Sequence[tuple[int, ...]], theirs: Sequence[tuple[int, ...]]) -> Comparison:
    """Compare answer by answer."""
    pairs = list(zip(ours, theirs, strict=True))
    differing = tuple((idx, _first_difference(*pair)) for idx, pair in enumerate(pairs) if pair[0] != pair[1])
    return Comparison(name, len(pairs), sum(len(answer) for answer in ours), differing)


def _first_difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    return next((idx for idx, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
