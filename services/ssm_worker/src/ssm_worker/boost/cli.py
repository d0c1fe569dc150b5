"""The command line: generate, held-out, train, report. Knows flags, progress bars and exit statuses; computes nothing.

Each subcommand can be killed at any time; the same command goes on where the last whole file ended.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from ssm_worker.boost.agreement import measure_agreement
from ssm_worker.boost.checkpoint import Mark, read_log
from ssm_worker.boost.corpus import TeacherSequence, read_corpus, read_shard
from ssm_worker.boost.dialogue import Mixture, Plan, plan_dialogue
from ssm_worker.boost.distil import Recipe
from ssm_worker.boost.generate import ShardStore, answer_plans, choose_prompts, fill, write_held_out
from ssm_worker.boost.prune import outer_layers, read_artefact
from ssm_worker.boost.report import Artefact, render_report
from ssm_worker.boost.speed import token_ms
from ssm_worker.boost.teacher import Teacher
from ssm_worker.boost.training import RunDirectory, TrainingRun, new_distiller
from ssm_worker.boost.turns import TeacherText, read_openers, read_prompts
from treecore.errors import ConfigError
from treecore.model.families import read_spec
from treecore.model.load import load_decoder

HELD_OUT_ANSWER_LEN = 96
SPEED_CONTEXT_LEN = 128
SPEED_TOKENS = 32


def main(argv: Sequence[str]) -> int:
    """Run one subcommand; returns the exit status. What is wrong with input or files is told in one line."""
    args = build_parser().parse_args(argv)
    try:
        args.command(args, RunDirectory(args.run))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; the same command goes on from here\n")
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog="python -m ssm_worker.boost",
        description="Train an SSM for a Llama-family teacher. Threads: OMP_NUM_THREADS.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_held_out(commands)
    _add_train(commands)
    _add(commands, "report", run_report, "measure the artefact and write report.md")
    return parser


def run_generate(args: argparse.Namespace, run: RunDirectory) -> None:
    """Let the teacher write dialogues until there are enough tokens of this seed."""
    spec = read_spec(args.teacher)
    text = TeacherText(args.teacher, spec.eos_token_ids)
    openers, mixture = [text.encode(opener) for opener in read_openers()], _mixture(args)
    store = ShardStore(run.corpus, args.seed, spec.vocab_size)
    row_len = mixture.row_len(text.turns, openers)
    teacher = Teacher(load_decoder(args.teacher, dtype="float32"), text.turns, args.rows, row_len)

    def plan(index: int) -> Plan:
        return plan_dialogue(index, args.seed, text.turns, openers, mixture)

    with tqdm(total=args.tokens, initial=store.num_tokens, unit="tok", desc="generate", smoothing=0.05) as bar:
        fill(store, teacher, plan, args.tokens, lambda num_tokens: _advance(bar, num_tokens))


def run_held_out(args: argparse.Namespace, run: RunDirectory) -> None:
    """Let the teacher answer prompts that no student is trained on."""
    if run.held_out.exists():
        raise ConfigError(f"{run.held_out}: is there already; delete it to choose and answer prompts anew")
    spec = read_spec(args.teacher)
    text = TeacherText(args.teacher, spec.eos_token_ids)
    prompts = [text.encode(prompt) for path in args.prompts for prompt in read_prompts(path)]
    chosen = choose_prompts(prompts, args.count, args.max_prompt_len, args.seed)
    plans = answer_plans(chosen, text.turns, HELD_OUT_ANSWER_LEN)
    row_len = max(len(plan.forced) for plan in plans) + HELD_OUT_ANSWER_LEN
    teacher = Teacher(load_decoder(args.teacher, dtype="float32"), text.turns, min(args.rows, len(plans)), row_len)
    with tqdm(total=len(plans), unit="answer", desc="held-out") as bar:
        write_held_out(run.held_out, teacher, plans, bar.update)


def run_train(args: argparse.Namespace, run: RunDirectory) -> None:
    """Distil a student from the text that is there."""
    spec = read_spec(args.teacher)
    corpus = read_corpus(run.corpus, spec.vocab_size)
    recipe = Recipe(
        layers=args.layers or outer_layers(spec.num_layers),
        num_head_rows=args.head_rows,
        token_visits=round(args.passes * corpus.num_positions),
        seed=args.seed,
        peak_lr=args.learning_rate,
    )
    training = TrainingRun(new_distiller(args.teacher, corpus, recipe), corpus, run, args.teacher)
    total = recipe.token_visits
    with tqdm(total=total, initial=training.num_visited, unit="tok", desc="train", smoothing=0.05) as bar:

        def on_step(num_tokens: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            _advance(bar, num_tokens)

        training.finish(_held_out(run, spec.vocab_size), args.checkpoint_steps, on_step, _tell_mark)


def run_report(args: argparse.Namespace, run: RunDirectory) -> None:
    """Measure the artefact as it is served, and write down what it cost."""
    corpus = read_corpus(run.corpus, read_spec(args.teacher).vocab_size)
    log = read_log(run.checkpoint) if run.checkpoint.exists() else None
    with tqdm(total=3, unit="measure", desc="report") as bar:
        held_out = _held_out(run, read_spec(args.teacher).vocab_size)
        agreement = measure_agreement(read_artefact(run.artefact, args.teacher), held_out) if held_out else None
        bar.update()
        artefact = _measure_speed(args.teacher, run.artefact, bar)
    text = render_report(artefact, corpus, log, agreement, torch.get_num_threads())
    run.report.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def _measure_speed(teacher: Path, artefact: Path, bar: "tqdm[None]") -> Artefact:
    big = load_decoder(teacher, dtype="float32")
    teacher_ms = token_ms(big, SPEED_CONTEXT_LEN, SPEED_TOKENS)
    bar.update()
    small = load_decoder(artefact, dtype="float32", embedding_from=teacher)
    ssm_ms = token_ms(small, SPEED_CONTEXT_LEN, SPEED_TOKENS)
    bar.update()
    return Artefact(
        teacher=big.spec.name,
        num_layers=small.spec.num_layers,
        num_teacher_layers=big.spec.num_layers,
        num_head_rows=small.spec.vocab_size if small.output_token_ids is None else len(small.output_token_ids),
        vocab_size=big.spec.vocab_size,
        num_bytes=(artefact / "model.safetensors").stat().st_size,
        ssm_ms=ssm_ms,
        teacher_ms=teacher_ms,
    )


def _advance(bar: "tqdm[None]", num_tokens: int) -> None:
    """Up to the bar's total: the last shard and the last batch are whole, and a bar beyond its end shows no ETA."""
    bar.update(min(num_tokens, max(0, bar.total - bar.n)))


def _mixture(args: argparse.Namespace) -> Mixture:
    return Mixture(max_prompt_len=args.max_prompt_len, max_answer_len=args.max_answer_len)


def _held_out(run: RunDirectory, vocab_size: int) -> tuple[TeacherSequence, ...]:
    return read_shard(run.held_out, vocab_size).sequences if run.held_out.exists() else ()


def _tell_mark(mark: Mark) -> None:
    shown = "/".join(f"{100 * share:.1f}" for share in mark.agreement) or "no held-out set"
    tqdm.write(f"step {mark.num_steps}: loss {mark.loss:.3f}, held-out top-1..5 {shown} %", file=sys.stderr)


def _add_generate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _add(commands, "generate", run_generate, "let the teacher write prompts and answers")
    parser.add_argument("--tokens", type=_positive, default=400_000, help="teacher tokens of this seed (400000)")
    parser.add_argument("--seed", type=_natural, default=0, help="another seed writes other text beside it (0)")
    parser.add_argument("--rows", type=_positive, default=64, help="dialogues at a time (64)")
    parser.add_argument("--max-prompt-len", type=_positive, default=110, help="tokens of a prompt (110)")
    parser.add_argument("--max-answer-len", type=_positive, default=140, help="tokens of an answer (140)")


def _add_held_out(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _add(commands, "held-out", run_held_out, "let the teacher answer prompts that are only measured on")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, metavar="FILE", help=".jsonl with a prompt")
    parser.add_argument("--count", type=_positive, default=64, help="how many of the prompts (64)")
    parser.add_argument("--max-prompt-len", type=_positive, default=150, help="only prompts of fewer tokens (150)")
    parser.add_argument("--seed", type=_natural, default=7, help="of the choice (7)")
    parser.add_argument("--rows", type=_positive, default=64, help="answers at a time (64)")


def _add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = _add(commands, "train", run_train, "distil the student and export the artefact")
    parser.add_argument("--layers", type=_layers, help="teacher layers to keep, like 0,1,28,29 (two at each end)")
    parser.add_argument("--head-rows", type=_positive, default=16_384, help="tokens that it can propose (16384)")
    parser.add_argument("--passes", type=_positive_number, default=8.0, help="times that the text is read (8)")
    parser.add_argument("--learning-rate", type=_positive_number, default=1.5e-3, help="the peak (0.0015)")
    parser.add_argument("--seed", type=_natural, default=0, help="of the order of the batches (0)")
    parser.add_argument("--checkpoint-steps", type=_positive, default=100, help="steps that a kill may cost (100)")


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, command: object, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.add_argument("--teacher", type=Path, required=True, help="the LLM's checkpoint directory")
    parser.add_argument("--run", type=Path, required=True, help="directory of all that this training makes")
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
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return value


def _layers(text: str) -> tuple[int, ...]:
    return tuple(_natural(part) for part in text.split(","))
