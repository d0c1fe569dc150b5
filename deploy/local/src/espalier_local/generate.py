"""`espalier generate`: one prompt, its text as it comes."""

import argparse
import json
import math
from dataclasses import asdict

from espalier_local.client import Answer, Ask, complete, served_model
from espalier_local.gateway import gateway
from espalier_local.interrupts import run_until_signal
from espalier_local.options import add_system_options, system_config
from espalier_local.output import say
from espalier_local.system import SystemConfig
from treecore.errors import InvalidRequest


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the subcommand."""
    parser = commands.add_parser("generate", help="answer one prompt", description=__doc__)
    add = parser.add_argument
    add("prompt", metavar="PROMPT")
    add("--max-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0, help="0 (default): always the most probable token")
    add("--seed", type=int, help="makes the answer at a temperature repeatable (default: a random one)")
    add("--no-speculation", action="store_true", help="plain incremental decoding; the text is the same")
    add("--json", action="store_true", help="print one JSON object instead of the text")
    add("--url", help="a running gateway, e.g. http://127.0.0.1:8000 (default: start a system for this prompt)")
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--chat", action="store_true", help="the prompt is a message: apply the chat template")
    style.add_argument("--raw", dest="chat", action="store_false", help="continue the prompt as it is (default)")
    add_system_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate; returns the exit status."""
    ask = _ask(args)
    config = system_config(args) if args.url is None else None
    return run_until_signal(lambda: _generate(args, config, ask))


async def _generate(args: argparse.Namespace, config: SystemConfig | None, ask: Ask) -> int:
    async with gateway(args.url, config) as client:
        answer = await complete(client, await served_model(client), ask, _ignore if args.json else _stream)
    say(json.dumps(_summary(answer), ensure_ascii=False) if args.json else "")
    return 0


def _ask(args: argparse.Namespace) -> Ask:
    try:
        args.prompt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("the prompt is not valid UTF-8") from error
    if not math.isfinite(args.temperature):
        raise InvalidRequest(f"--temperature {args.temperature} is no number that JSON has")
    return Ask(
        prompt=args.prompt,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        speculation=not args.no_speculation,
        tree=args.tree,
        chat=args.chat,
    )


def _summary(answer: Answer) -> dict[str, object]:
    return {name: value for name, value in asdict(answer).items() if name != "num_tokens"}


def _stream(text: str) -> None:
    say(text, end="")


def _ignore(_text: str) -> None:
    pass
