"""The flags of `espalier boost` and its exit statuses. Computes nothing.

Without the name of another command it is the boosting itself. Each command can be killed at any time; the same command
goes on where the last whole file ended.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from ssm_worker.boost.boosting import BoostPlan
from ssm_worker.boost.coverage import CoverRule, Unit
from ssm_worker.boost.distil import Recipe, Targets
from ssm_worker.boost.measuring import run_boost, run_measure
from ssm_worker.boost.start import GivenCheckpoint, KeptLayers, RandomLayers, Start
from ssm_worker.boost.writing import run_complete, run_generate, run_prompts
from treecore.errors import ConfigError

_BOOST = "run"
_PROGRAM = "espalier boost"


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit status. What is wrong with input or files is told in one line."""
    args = build_parser().parse_args(_named(argv))
    try:
        args.command(args)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; the same command goes on from here\n")
        return 130
    return 0


def _named(argv: Sequence[str]) -> Sequence[str]:
    """With the name of the command that flags alone stand for."""
    is_flag = bool(argv) and argv[0].startswith("-") and argv[0] not in ("-h", "--help")
    return [_BOOST, *argv] if is_flag else argv


def build_parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description=f"Train SSMs for a Llama-family LLM. `{_PROGRAM} --llm ...` is short for `{_PROGRAM} {_BOOST} --llm"
        " ...`. Threads: OMP_NUM_THREADS.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_boost(commands)
    _add_prompts(commands)
    _add_complete(commands)
    _add_generate(commands)
    _add_measure(commands)
    return parser


def boost_plan(args: argparse.Namespace, llm_fingerprint: str) -> BoostPlan:
    """What the flags of the boosting say."""
    recipe = Recipe(
        start="",
        llm=llm_fingerprint,
        num_head_rows=args.head_rows,
        token_visits=0,
        targets=args.targets,
        seed=args.seed,
        peak_lr=args.learning_rate,
        weight_decay=args.weight_decay,
        batch_len=args.batch_len,
        temperature=args.loss_temperature,
        logit_scale=args.logit_scale,
    )
    return BoostPlan(
        num_ssms=args.num_ssms,
        starts=tuple(_start(text, args) for text in args.start or ["layers"]),
        recipe=recipe,
        passes=args.passes,
        rule=CoverRule(args.unit, args.covered_rank, args.first_tokens, args.covered_weight),
        checkpoint_steps=args.checkpoint_steps,
    )


def _start(text: str, args: argparse.Namespace) -> Start | None:
    if text == "layers":
        return KeptLayers(args.layers)
    if text == "random":
        if args.shape is None:
            raise ConfigError("--start random: needs a --shape")
        return RandomLayers(*args.shape)
    return None if text == "previous" else GivenCheckpoint(Path(text))


def _add_boost(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _add(commands, _BOOST, _run_boost, "train SSMs one after another on what those before cannot do (default)")
    parser.add_argument("--num-ssms", type=_positive, default=1, help="how many SSMs (1)")
    parser.add_argument("--prompts", type=Path, nargs="+", metavar="FILE", help=".jsonl; without: the text in --run")
    parser.add_argument("--held-out", type=Path, nargs="+", metavar="FILE", help=".jsonl with prompts to measure on")
    parser.add_argument("--held-out-count", type=_positive, default=64, help="how many of them, by lot (64)")
    _add_answer_flags(parser)
    add = parser.add_argument_group("what is left for the next SSM").add_argument
    add("--unit", choices=get_args(Unit), default="prompt", help="covered prompts are removed, or tokens weigh less")
    add("--covered-rank", type=_positive, default=1, help="covered: among the best so many guesses (1)")
    add("--first-tokens", type=_positive, help="a prompt is covered if so many first tokens are (all)")
    add("--covered-weight", type=_share, default=0.0, help="what a covered token still weighs (0)")
    add = parser.add_argument_group("what an SSM is made of").add_argument
    add("--start", action="append", help="layers (default), random, previous or a checkpoint directory; once an SSM")
    add("--layers", type=_naturals, default=(), help="of --start layers, like 0,1,28,29 (two at each end)")
    add("--shape", type=_shape, help="of --start random: LAYERS,HEADS,KV_HEADS,INTERMEDIATE_SIZE")
    add("--head-rows", type=_positive, default=16_384, help="tokens that it can propose (16384)")
    add = parser.add_argument_group("how it is trained").add_argument
    add("--targets", choices=get_args(Targets), default="soft", help="the LLM's top 20 log-probs (soft) or best token")
    add("--passes", type=_positive_number, default=8.0, help="times that the text is read (8)")
    add("--learning-rate", type=_positive_number, default=1.5e-3, help="the peak (0.0015)")
    add("--weight-decay", type=_share, default=0.01, help="of AdamW (0.01)")
    add("--batch-len", type=_positive, default=8, help="sequences in a step (8)")
    add("--loss-temperature", type=_positive_number, default=0.6, help="of both laws in the loss (0.6)")
    add("--logit-scale", type=_positive_number, default=1.0, help="of the artefact: above 1 is bolder when sampled (1)")
    add("--checkpoint-steps", type=_positive, default=100, help="steps that a kill may cost (100)")


def _run_boost(args: argparse.Namespace) -> None:
    if args.prompts:
        run_complete(args)
    run_boost(args, lambda llm_fingerprint: boost_plan(args, llm_fingerprint))


def _add_prompts(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "print prompts out of templates and subjects, a JSON object a line"
    parser = commands.add_parser("prompts", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(command=run_prompts)
    parser.add_argument("--count", type=_positive, required=True, help="how many, all different")
    parser.add_argument("--seed", type=_natural, default=0, help="another seed makes other prompts (0)")
    passages = "texts to summarise, translate, ...: files, parted by empty lines"
    parser.add_argument("--passages", type=Path, nargs="+", default=[], metavar="FILE", help=passages)
    parser.add_argument("--passages-from", type=Path, metavar="RUN", help="the same: answers in an earlier --run")
    parser.add_argument("--llm", type=Path, help="of that run")


def _add_complete(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _add(commands, "complete", run_complete, "let the LLM complete prompts, into the run's text")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, metavar="FILE", help=".jsonl with a prompt")
    _add_answer_flags(parser)


def _add_answer_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("completions").add_argument
    add("--max-prompt-len", type=_positive, default=200, help="tokens; longer prompts are left out (200)")
    add("--max-answer-len", type=_positive, default=128, help="tokens (128)")
    add("--greedy-share", type=_share, default=1.0, help="of the completions; the others are sampled (1)")
    add("--temperatures", type=_temperatures, default=(0.6, 0.8, 1.0), help="at one of these (0.6,0.8,1)")
    _add_row_flags(parser)


def _add_generate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _add(commands, "generate", run_generate, "let the LLM write prompts and answers, into the run's text")
    parser.add_argument("--tokens", type=_positive, default=400_000, help="the LLM's tokens of this seed (400000)")
    parser.add_argument("--max-prompt-len", type=_positive, default=110, help="tokens of a prompt (110)")
    parser.add_argument("--max-answer-len", type=_positive, default=140, help="tokens of an answer (140)")
    _add_row_flags(parser)


def _add_row_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=_natural, default=0, help="of all that is drawn by lot (0)")
    parser.add_argument("--rows", type=_positive, default=64, help="sequences that the LLM writes at a time (64)")


def _add_measure(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "print how often artefacts, alone and merged, hold the LLM's token"
    parser = commands.add_parser("measure", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(command=run_measure)
    parser.add_argument("artefacts", type=Path, nargs="+", metavar="ARTEFACT")
    parser.add_argument("--llm", type=Path, required=True, help="whose SSMs they are")
    parser.add_argument("--held-out", type=Path, required=True, metavar="FILE", help="a run's held-out.npz")


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    command: Callable[[argparse.Namespace], None],
    text: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.add_argument("--llm", type=Path, required=True, help="the LLM's checkpoint directory")
    parser.add_argument("--run", type=Path, required=True, help="directory of all that this run makes")
    parser.set_defaults(command=command)
    return parser


def _positive(text: str) -> int:
    return _at_least(1, text)


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
    return int(text)


def _positive_number(text: str) -> float:
    return _number(text, lambda value: 0 < value < float("inf"), "positive number")


def _share(text: str) -> float:
    return _number(text, lambda value: 0 <= value <= 1, "number from 0 to 1")


def _number(text: str, is_good: Callable[[float], bool], what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not is_good(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")
    return value


def _temperatures(text: str) -> tuple[float, ...]:
    return tuple(_positive_number(part) for part in text.split(","))


def _naturals(text: str) -> tuple[int, ...]:
    return tuple(_natural(part) for part in text.split(","))


def _shape(text: str) -> tuple[int, ...]:
    sizes = tuple(_positive(part) for part in text.split(","))
    if len(sizes) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not LAYERS,HEADS,KV_HEADS,INTERMEDIATE_SIZE")
    return sizes
