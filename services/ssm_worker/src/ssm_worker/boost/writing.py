"""The commands that make text: prompts, completions, dialogues, held-out answers. Knows flags and files only."""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ssm_worker.boost.artefact import fingerprint
from ssm_worker.boost.bars import TokenBar
from ssm_worker.boost.corpus import TeacherSequence, read_corpus, read_shard, write_shard
from ssm_worker.boost.dialogue import Answers, Mixture, Plan, plan_answer, plan_dialogue
from ssm_worker.boost.generate import ShardStore, choose_prompts, fill, missing_shards, shards_until, write
from ssm_worker.boost.prompts import distinct_prompts, shipped_source
from ssm_worker.boost.record import keep_record
from ssm_worker.boost.teacher import Teacher
from ssm_worker.boost.training import RunDirectory
from ssm_worker.boost.turns import TeacherText, TokenIds, read_openers, read_passages, read_prompts
from treecore.errors import ConfigError
from treecore.model.families import read_spec
from treecore.model.load import load_decoder


def run_prompts(args: argparse.Namespace) -> None:
    """Print prompts, a JSON object a line."""
    passages = [passage for path in args.passages for passage in read_passages(path)]
    if args.passages_from is not None:
        if args.llm is None:
            raise ConfigError("--passages-from: needs the --llm that wrote them")
        passages += _answers_in(RunDirectory(args.passages_from), args.llm)
    for prompt in distinct_prompts(shipped_source(passages), args.count, args.seed):
        sys.stdout.write(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n")


def run_complete(args: argparse.Namespace) -> None:
    """Let the LLM complete given prompts."""
    run, text, seed = RunDirectory(args.run), _text(args.llm), args.seed
    prompts = _short_prompts(args.prompts, text, args.max_prompt_len)
    answers = Answers(args.greedy_share, args.temperatures, args.max_answer_len)
    settings = {"prompts": _digest(prompts), "answers": asdict(answers)}
    keep_record(run.corpus, seed, {"command": "complete", "llm": fingerprint(args.llm), "rows": args.rows, **settings})
    plans = [plan_answer(index, prompt, seed, text.turns, answers) for index, prompt in enumerate(prompts)]
    store = ShardStore(run.corpus, seed, read_spec(args.llm).vocab_size)
    if store.num_sequences < len(plans):
        teacher = _teacher(args, text, _row_len(plans))
        with TokenBar("complete", len(plans), store.num_sequences, unit="prompt") as bar:
            fill(store, teacher, missing_shards(store, plans), lambda _: bar.advance(1))


def run_generate(args: argparse.Namespace) -> None:
    """Let the LLM write dialogues, prompts included, until there are enough tokens of this seed."""
    run, text, seed = RunDirectory(args.run), _text(args.llm), args.seed
    mixture = Mixture(max_prompt_len=args.max_prompt_len, answers=Answers(0.55, max_len=args.max_answer_len))
    record = {"command": "generate", "llm": fingerprint(args.llm), "rows": args.rows, "mixture": asdict(mixture)}
    keep_record(run.corpus, seed, record)
    openers = [text.encode(opener) for opener in read_openers()]
    plan = partial(plan_dialogue, seed=seed, turns=text.turns, openers=openers, mixture=mixture)
    store = ShardStore(run.corpus, seed, read_spec(args.llm).vocab_size)
    teacher = _teacher(args, text, mixture.row_len(text.turns, openers))
    with TokenBar("generate", args.tokens, store.num_tokens) as bar:
        fill(store, teacher, shards_until(store, plan, args.tokens), lambda written: bar.advance(written.num_tokens))


def held_out_answers(args: argparse.Namespace) -> tuple[TeacherSequence, ...]:
    """Greedy answers to prompts that no SSM is trained on: read, or written first if there are prompts for them."""
    run, vocab_size = RunDirectory(args.run), read_spec(args.llm).vocab_size
    found = read_shard(run.held_out, vocab_size).sequences if run.held_out.exists() else None
    if not args.held_out:
        return found or ()
    text = _text(args.llm)
    prompts = [text.encode(prompt) for path in args.held_out for prompt in read_prompts(path)]
    chosen = choose_prompts(prompts, args.held_out_count, args.max_prompt_len, args.seed)
    answers = Answers(max_len=args.max_answer_len)
    plans = [plan_answer(index, prompt, args.seed, text.turns, answers) for index, prompt in enumerate(chosen)]
    if found is None:
        with TokenBar("held-out", len(plans), 0, unit="prompt") as bar:
            shard = write(_teacher(args, text, _row_len(plans)), plans, lambda _: bar.advance(1))
        write_shard(run.held_out, shard)
        return shard.sequences
    if [tuple(answer.tokens[: answer.start].tolist()) for answer in found] != [plan.forced for plan in plans]:
        raise ConfigError(f"{run.held_out}: has answers to other prompts; delete it, or leave --held-out away")
    return found


def _answers_in(run: RunDirectory, llm: Path) -> list[str]:
    text = _text(llm)
    corpus = read_corpus(run.corpus, read_spec(llm).vocab_size)
    return [text.answer(sequence) for sequence in corpus.sequences]


def _short_prompts(paths: Sequence[Path], text: TeacherText, max_len: int) -> list[TokenIds]:
    prompts = [text.encode(prompt) for path in paths for prompt in read_prompts(path)]
    short = [prompt for prompt in prompts if 0 < len(prompt) <= max_len]
    if len(short) < len(prompts):
        sys.stderr.write(f"{len(prompts) - len(short)} prompts of more than {max_len} tokens are left out\n")
    if not short:
        raise ConfigError(f"{', '.join(map(str, paths))}: no prompt of at most {max_len} tokens")
    return short


def _text(llm: Path) -> TeacherText:
    return TeacherText(llm, read_spec(llm).eos_token_ids)


def _teacher(args: argparse.Namespace, text: TeacherText, row_len: int) -> Teacher:
    return Teacher(load_decoder(args.llm, dtype="float32"), text.turns, args.rows, row_len)


def _row_len(plans: Sequence[Plan]) -> int:
    return max(len(plan.forced) + plan.max_answer_len for plan in plans)


def _digest(prompts: Sequence[TokenIds]) -> str:
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
