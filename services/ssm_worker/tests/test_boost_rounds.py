"""Boosting: what is covered, what the next SSM learns, and that a kill at any time changes nothing."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssm_worker.boost.agreement import agreement, greedy_ranks, merged, sampled_ranks
from ssm_worker.boost.archive import read_archive, write_archive
from ssm_worker.boost.bars import TokenBar
from ssm_worker.boost.cli import main
from ssm_worker.boost.corpus import TeacherSequence
from ssm_worker.boost.coverage import CoverRule, covered_prompts, find_hits, lessons_after, split_rows
from ssm_worker.boost.start import KeptLayers, new_student
from ssm_worker.boost.student import Student
from ssm_worker.boost.testing import random_sequences, write_tiny_teacher
from treecore.model.load import load_decoder
from treecore.testing.checkpoints import write_tiny_llama

VOCAB = 30


def greedy_sequences(count: int, seed: int = 0) -> list[TeacherSequence]:
    """Of which the even ones are greedy: the LLM's best token follows. The odd ones, or their prompts, are not."""
    found = []
    long = [each for each in random_sequences(3 * count, VOCAB, seed=seed) if each.num_tokens > 1]
    for idx, sequence in enumerate(long[:count]):
        best = sequence.top_ids[: sequence.num_tokens, 0]
        tokens = np.concatenate([sequence.tokens[: sequence.start], best if idx % 2 == 0 else best + 1])
        found.append(
            TeacherSequence(tokens.astype(np.int32), sequence.start, idx % 4 // 3, sequence.top_ids, sequence.top_logp)
        )
    return found


def random_hits(sequences: Sequence[TeacherSequence], share: float, seed: int) -> np.ndarray:
    """True with probability `share`."""
    return np.random.default_rng(seed).random(sum(len(each.top_ids) for each in sequences)) < share


@given(share=st.sampled_from([0.3, 0.9, 1.0]), first=st.sampled_from([None, 1, 3]), seed=st.integers(0, 20))
@settings(deadline=None)
def test_a_prompt_is_covered_if_its_completion_is_reproduced(share: float, first: int | None, seed: int) -> None:
    """Token by token, up to `first_tokens`; what follows the last token does not matter, and sampled ones never are."""
    sequences = greedy_sequences(8, seed)
    hits = random_hits(sequences, share, seed)
    found = covered_prompts(sequences, hits, CoverRule(first_tokens=first))
    rows = iter(hits.tolist())
    for idx, sequence in enumerate(sequences):
        own = [next(rows) for _ in sequence.top_ids]
        wanted = own[: sequence.num_tokens][:first]
        assert found[idx] == (idx % 2 == 0 and all(wanted))


@given(num_hits=st.integers(0, 3), share=st.sampled_from([0.2, 0.95]), weight=st.sampled_from([0.0, 0.25]))
@settings(deadline=None)
def test_the_next_ssm_learns_what_none_before_can(num_hits: int, share: float, weight: float) -> None:
    """By prompts: those that no SSM covers, whole. By tokens: all, but what any SSM holds weighs `weight`."""
    sequences = greedy_sequences(9)
    hits = [random_hits(sequences, share, seed) for seed in range(num_hits)]
    by_prompt = lessons_after(sequences, hits, CoverRule("prompt"))
    masks = [covered_prompts(sequences, each, CoverRule()) for each in hits]
    left = [each for idx, each in enumerate(sequences) if not any(mask[idx] for mask in masks)]
    assert [each.tokens.tolist() for each in by_prompt.sequences] == [each.tokens.tolist() for each in left]
    assert all((each == 1).all() for each in by_prompt.weights)
    by_token = lessons_after(sequences, hits, CoverRule("token", covered_weight=weight))
    expected = []
    for idx, sequence in enumerate(sequences):
        parts = [split_rows(each, sequences)[idx] for each in hits]
        row = [weight if any(part[at] for part in parts) else 1.0 for at in range(len(sequence.top_ids))]
        expected += [row] if any(row) else []
    assert [each.tolist() for each in by_token.weights] == expected


@pytest.fixture(scope="module")
def students(tmp_path_factory: pytest.TempPathFactory) -> list[Student]:
    """Two with different heads."""
    llm = write_tiny_llama(tmp_path_factory.mktemp("llm"), num_hidden_layers=4, vocab_size=VOCAB)
    heads = (np.arange(VOCAB), np.arange(4, 25))
    return [new_student(llm, KeptLayers(layers), head, 0) for layers, head in zip(((0, 3), (1, 2)), heads, strict=True)]


def test_hits_are_found_by_rank(students: list[Student]) -> None:
    """Against a sort of each position's logits; in the order of the sequences."""
    sequences = random_sequences(11, VOCAB)
    for student in students:
        head = student.vocabulary.head_token_ids
        expected = []
        for sequence in sequences:
            with torch.no_grad():
                logits = student.logits(student(torch.from_numpy(sequence.tokens).long()[None]))[0]
            best = head[logits[sequence.start - 1 :].argsort(descending=True)[:, :2]]
            expected += [bool(row) for row in (best == torch.from_numpy(sequence.top_ids[:, :1])).any(1)]
        read: list[int] = []
        assert find_hits(student, sequences, 2, read.append).tolist() == expected
        assert sum(read) == sum(len(sequence.tokens) for sequence in sequences)


def test_merged_ssms_hold_what_any_of_them_holds(students: list[Student]) -> None:
    """Top-k of the merge is the union of each one's top-k; a first SSM with all guesses is the comparison."""
    held_out = random_sequences(30, VOCAB, seed=3)
    ranks = [greedy_ranks(student, held_out) for student in students]
    both = agreement(merged(ranks))
    for k in range(1, 6):
        assert both.top[k - 1] == np.mean((ranks[0] < k) | (ranks[1] < k))
        assert agreement(ranks[0], 2).top[k - 1] == np.mean(ranks[0] < 2 * k)
    assert both.num_positions == sum(sequence.num_tokens for sequence in held_out)


class Oracle(Student):
    """Says what a table says, whatever it read: logits fp32 [V_out]."""

    def __init__(self, student: Student, table: torch.Tensor) -> None:
        torch.nn.Module.__init__(self)
        self.spec, self.vocabulary, self.table = student.spec, student.vocabulary, table

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table.expand(len(hidden), -1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*tokens.shape, 1)


def fixed_law(num_positions: int, p: np.ndarray) -> list[TeacherSequence]:
    """A sequence at each of whose positions the LLM's law is p [V]."""
    ids = np.tile(np.argsort(-p).astype(np.int32), (num_positions + 1, 1))
    logp = np.tile(np.log(np.sort(p)[::-1]).astype(np.float16), (num_positions + 1, 1))
    return [TeacherSequence(np.zeros(num_positions + 1, np.int32), 1, 0.0, ids, logp)]


def test_coupled_guesses_of_the_same_law_always_hold_the_token(students: list[Student]) -> None:
    """And of another law as often as a simulation of the rule by itself says (false alarm: five sigma)."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.full(VOCAB, 0.4), 2) + 1e-6
    num_positions, temperature = 4000, 0.8
    held_out = fixed_law(num_positions, p)
    same = Oracle(students[0], torch.from_numpy(held_out[0].top_logp[0][np.argsort(held_out[0].top_ids[0])]).float())
    assert not sampled_ranks(same, held_out, temperature, 1).any()
    other = Oracle(students[0], torch.from_numpy(np.log(q)).float())
    found = agreement(sampled_ranks(other, held_out, temperature, 1)).top
    noise = rng.gumbel(size=(num_positions, VOCAB))
    drawn = (np.log(p) / temperature + noise).argmax(1)
    order = (np.log(q) / temperature + noise).argsort(1)[:, ::-1]
    expected = [np.mean((order[:, :k] == drawn[:, None]).any(1)) for k in range(1, 6)]
    np.testing.assert_allclose(found, expected, atol=5 * 0.5 * (2 / num_positions) ** 0.5)
    assert expected[0] < 0.9


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an instruct model of three layers, and prompts."""
    root = tmp_path_factory.mktemp("tiny")
    write_tiny_teacher(root / "llm", num_hidden_layers=3)
    for name, count in (("prompts", 12), ("held-out", 5)):
        lines = [json.dumps({"prompt": f"{name} {number}?"}) + "\n" for number in range(count)]
        (root / f"{name}.jsonl").write_text("".join(lines))
    return root


def flags(tiny: Path, run: Path, *more: str) -> list[str]:
    """Two SSMs, the second on tokens that the first misses."""
    files = ["--llm", str(tiny / "llm"), "--run", str(run), "--prompts", str(tiny / "prompts.jsonl")]
    held_out = ["--held-out", str(tiny / "held-out.jsonl"), "--held-out-count", "3"]
    sizes = ["--max-answer-len", "6", "--rows", "5", "--batch-len", "4", "--passes", "1.5", "--checkpoint-steps", "2"]
    recipe = ["--unit", "token", "--num-ssms", "2", "--layers", "0,2", "--head-rows", "70", "--greedy-share", "0.7"]
    return [*files, *held_out, *sizes, *recipe, *more]


def result(run: Path) -> dict[str, Any]:
    """All files of a run but the report, without the times that things took."""
    found: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.suffix == ".npz":
            arrays = read_archive(path)
            arrays.pop("wall_s", None)
            meta = json.loads(str(arrays.pop("meta", np.array("{}"))))
            for mark in meta.get("marks", []):
                del mark["wall_s"]
            found[name] = ({key: array.tobytes() for key, array in arrays.items()}, meta)
        elif path.is_file() and path.suffix != ".md":
            found[name] = path.read_bytes()
    return found


class Killed(Exception):
    """The process died."""


def run_until(monkeypatch: pytest.MonkeyPatch, argv: list[str], dies_at: int | None) -> int:
    """One process; it dies when something is done for the n-th time. Returns how often that was."""
    done: list[int] = []

    def advance(_bar: TokenBar, count: int) -> None:
        done.append(count)
        if len(done) == dies_at:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(TokenBar, "advance", advance)
        assert main(argv) == 0
    return len(done)


@pytest.fixture(scope="module")
def undisturbed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing killed."""
    run = tmp_path_factory.mktemp("undisturbed")
    assert main(flags(tiny, run)) == 0
    return run


def test_killed_at_random_points_a_run_ends_the_same(
    tiny: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it completes, trains or covers, once or again and again: every file has the same bytes."""
    total = run_until(monkeypatch, flags(tiny, tmp_path / "count"), None)
    assert total > 25
    expected = result(undisturbed)
    for dies_at in random.sample(range(1, total + 1), 4):
        run = tmp_path / str(dies_at)
        with pytest.raises(Killed):
            run_until(monkeypatch, flags(tiny, run), dies_at)
        assert run_until(monkeypatch, flags(tiny, run), None) <= total
        assert result(run) == expected
    run, deaths = tmp_path / "often", 0
    while True:
        try:
            run_until(monkeypatch, flags(tiny, run), 14)
        except Killed:
            deaths += 1
        else:
            break
    assert deaths > 1
    assert result(run) == expected


def test_a_run_that_was_killed_with_signal_9_ends_the_same(tiny: Path, undisturbed: Path, tmp_path: Path) -> None:
    """A real process, behind its first checkpoint."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "ssm_worker.boost", *flags(tiny, run)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        assert any("step 2:" in line for line in process.stderr)
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert (run / "ssm-1" / "checkpoint.npz").exists()
    assert not (run / "report.md").exists()
    assert main(flags(tiny, run)) == 0
    assert result(run) == result(undisturbed)


def test_a_run_ends_with_artefacts_and_a_report(
    tiny: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both SSMs load; the report has rounds and both tables; the same command again only measures."""
    before = result(undisturbed)
    assert main(flags(tiny, undisturbed)) == 0
    printed = capsys.readouterr().out
    assert result(undisturbed) == before
    assert printed == (undisturbed / "report.md").read_text()
    for words in ("## Rounds", "| SSMs 1 to 2, merged |", "| SSM 1, 2 times the guesses |", "T = 0.8", "of SSM 2"):
        assert words in printed
    artefacts = [str(undisturbed / name / "artefact") for name in ("ssm-1", "ssm-2")]
    for artefact in artefacts:
        spec = load_decoder(Path(artefact), dtype="float32", embedding_from=tiny / "llm").spec
        assert spec.num_layers == 2
    assert (
        main(["measure", "--llm", str(tiny / "llm"), "--held-out", str(undisturbed / "held-out.npz"), *artefacts]) == 0
    )
    assert capsys.readouterr().out.split("## Agreement, greedy")[1].strip() in printed


def test_no_ssm_is_trained_on_nothing(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is the LLM itself covers every prompt: the second round does not take place."""
    whole = ["--layers", "0,1,2", "--head-rows", "98", "--learning-rate", "1e-9", "--greedy-share", "1"]
    assert main(flags(tiny, tmp_path, *whole, "--unit", "prompt", "--covered-rank", "2")) == 0
    assert "| 12 | 12 (100.0%) |" in capsys.readouterr().out
    assert not (tmp_path / "ssm-2").exists()


def test_the_second_ssm_can_start_where_the_first_ended(tiny: Path, tmp_path: Path) -> None:
    """`--start previous`; for the first there is none."""
    starts = ["--start", "random", "--shape", "1,2,1,8", "--start", "previous"]
    assert main(flags(tiny, tmp_path / "run", *starts)) == 0
    metas = [result(tmp_path / "run")[f"ssm-{idx}/checkpoint.npz"][1]["recipe"]["start"] for idx in (1, 2)]
    assert metas[0] == "random 1,2,1,8"
    assert metas[1].startswith("checkpoint ")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--learning-rate", "1e-4"], "ssm-1/checkpoint.npz: belongs to a run with another peak_lr"),
        (["--layers", "0,1"], "ssm-1/checkpoint.npz: belongs to a run with another start"),
        (["--max-answer-len", "5"], "corpus/seed0.json: this text was begun with another answers"),
        (["--rows", "4"], "corpus/seed0.json: this text was begun with another rows"),
        (["--covered-rank", "2"], "ssm-1/hits.npz: belongs to another SSM or text"),
        (["--held-out-count", "4"], "held-out.npz: has answers to other prompts"),
        (["--start", "previous"], "--start previous"),
        (["--start", "random"], "--shape"),
        (["--start", "nowhere"], "nowhere: no checkpoint directory"),
    ],
)
def test_what_does_not_fit_is_refused(
    tiny: Path, undisturbed: Path, more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line that names the file or the flag, and nothing is changed."""
    before = result(undisturbed)
    assert main(flags(tiny, undisturbed, *more)) == 1
    errors = [line for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert words in errors[0]
    assert result(undisturbed) == before


@pytest.mark.parametrize("name", ["ssm-2/checkpoint.npz", "ssm-1/hits.npz", "corpus/seed0-00000.npz", "held-out.npz"])
def test_a_corrupt_file_is_refused(
    tiny: Path, undisturbed: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name; it is left as it is."""
    path = undisturbed / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    try:
        assert main(flags(tiny, undisturbed)) == 1
        assert f"{name}: corrupt" in capsys.readouterr().err
        assert path.read_bytes() == whole[:-40]
        write_archive(path, {"nothing": np.zeros(2)})
        assert main(flags(tiny, undisturbed)) == 1
        assert f"{name}: " in capsys.readouterr().err
    finally:
        path.write_bytes(whole)
