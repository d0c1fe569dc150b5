"""Distillation: the loss, the order of batches, that a student learns, and that a kill changes nothing."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ssm_worker.boost.agreement import measure_agreement
from ssm_worker.boost.archive import read_archive
from ssm_worker.boost.artefact import read_student
from ssm_worker.boost.batches import BatchOrder, TrainingBatch, collate
from ssm_worker.boost.checkpoint import read_log
from ssm_worker.boost.distil import Distiller, Recipe, distillation_loss
from ssm_worker.boost.lessons import Lessons, even_lessons, weighted_lessons
from ssm_worker.boost.student import column_of_token
from ssm_worker.boost.testing import prune, random_sequences, student_logits
from ssm_worker.boost.training import SsmDirectory, TrainingRun
from treecore.errors import ConfigError
from treecore.testing.checkpoints import TINY

VOCAB = TINY["vocab_size"]
ALL_TOKENS = np.arange(VOCAB)
CORPUS = even_lessons(random_sequences(21, VOCAB))
HELD_OUT = random_sequences(9, VOCAB, seed=1)
RECIPE = Recipe(
    start="layers 0,3", llm="", num_head_rows=50, token_visits=CORPUS.num_positions + 90, batch_len=3, pool_len=6
)


def new_distiller(llm: Path, lessons: Lessons, recipe: Recipe) -> Distiller:
    """The start of a run."""
    return Distiller(prune(llm, (0, 3), np.arange(recipe.num_head_rows)), lessons, recipe)


def naive_loss(logits: Tensor, batch: TrainingBatch, head: list[int], temperature: float) -> float:
    """Token by token in float64, as the formula reads."""
    losses, total = [], 0.0
    rows = zip(
        logits.detach().double(),
        batch.top_ids.tolist(),
        batch.top_logp.tolist(),
        batch.weights.tolist(),
        strict=True,
    )
    for row, ids, logp, counts in rows:
        pairs = [(head.index(token), value) for token, value in zip(ids, logp, strict=True) if token in head]
        if not pairs:
            continue
        log_q = (row / temperature).log_softmax(0)
        p = torch.tensor([value / temperature for _, value in pairs], dtype=torch.float64).softmax(0)
        losses.append(
            -counts * sum(float(weight * log_q[column]) for weight, (column, _) in zip(p, pairs, strict=True))
        )
        total += counts
    return sum(losses) / total if losses else 0.0


@given(
    head=st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True),
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.6, 1.0]),
)
@settings(max_examples=40, deadline=None)
def test_the_loss_is_the_formula(head: list[int], seed: int, temperature: float) -> None:
    """Tokens outside of the trimmed head are left out of the teacher's law; positions without any, of the mean.

    So are those that weigh nothing.
    """
    sequences = random_sequences(3, 12, seed=seed)
    rng = np.random.default_rng(seed)
    batch = collate(sequences, [rng.integers(0, 3, len(each.top_ids)).astype(np.float32) for each in sequences])
    logits = torch.randn(len(batch.top_ids), len(head), generator=torch.Generator().manual_seed(seed))
    logits.requires_grad_()
    found = distillation_loss(logits / temperature, batch, column_of_token(torch.tensor(head), 12), temperature)
    assert found.item() == pytest.approx(naive_loss(logits, batch, head, temperature), abs=1e-4)
    found.backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_a_head_that_the_teacher_never_uses_teaches_nothing() -> None:
    """No position has a target: loss and gradient are zero, and nothing is NaN."""
    batch = collate(random_sequences(2, 12))
    batch = dataclasses.replace(batch, top_ids=torch.full_like(batch.top_ids, 5))
    logits = torch.randn(len(batch.top_ids), 2, requires_grad=True)
    loss = distillation_loss(logits / 0.6, batch, column_of_token(torch.tensor([0, 1]), 12), 0.6)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_targets_are_the_positions_behind_the_opening() -> None:
    """As many as there are rows of log-probs, in their order; padding is none."""
    sequences = random_sequences(4, VOCAB)
    batch = collate(sequences)
    assert int(batch.is_target.sum()) == len(batch.top_ids) == sum(len(sequence.top_ids) for sequence in sequences)
    for row, sequence in zip(batch.is_target, sequences, strict=True):
        assert row.nonzero()[:, 0].tolist() == list(range(sequence.start - 1, len(sequence.tokens)))


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    batch_len=st.integers(1, 5),
    pool_len=st.integers(1, 12),
    seed=st.integers(0, 5),
)
def test_the_order_is_a_function_of_the_step(lengths: list[int], batch_len: int, pool_len: int, seed: int) -> None:
    """Every epoch has all sequences once; asked in any order, a step's batch is the same."""
    order = BatchOrder(lengths, seed, batch_len, pool_len)
    series: list[list[int]] = []
    while sum(map(len, series)) < 2 * len(lengths):
        series.append(order[len(series)].tolist())
    half = len(series) // 2
    for epoch in (series[:half], series[half:]):
        assert sorted(idx for batch in epoch for idx in batch) == list(range(len(lengths)))
    fresh = BatchOrder(lengths, seed, batch_len, pool_len)
    assert [fresh[step].tolist() for step in reversed(range(len(series)))] == series[::-1]


def test_the_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    """Peak after the warm-up, half-way in the middle, the floor at the end and behind it."""
    recipe = dataclasses.replace(RECIPE, token_visits=1000, peak_lr=1.0, final_lr_share=0.1, num_warmup_steps=10)
    assert recipe.lr(0, 0) == pytest.approx(0.1)
    assert recipe.lr(9, 0) == pytest.approx(1.0)
    assert recipe.lr(500, 500) == pytest.approx(0.55)
    assert recipe.lr(900, 1000) == recipe.lr(901, 1100) == pytest.approx(0.1)


def test_a_student_learns(teacher: Path) -> None:
    """The loss falls, and so rises the agreement on text that it has not seen."""
    recipe = dataclasses.replace(RECIPE, token_visits=25 * CORPUS.num_positions, num_head_rows=VOCAB, peak_lr=1e-2)
    distiller = new_distiller(teacher, CORPUS, recipe)
    before = measure_agreement(distiller.student, HELD_OUT)
    distiller.step()
    first = distiller.mean_loss
    while not distiller.is_done:
        distiller.step()
    after = measure_agreement(distiller.student, HELD_OUT)
    assert first is not None
    assert distiller.mean_loss is not None
    assert distiller.mean_loss < 0.8 * first
    assert after.top[0] > before.top[0] + 0.1


def test_agreement_counts_by_hand(teacher: Path) -> None:
    """Against a loop over positions; a token that the head lacks is a miss, and a tiny head has fewer guesses."""
    for head in (np.arange(10, 40), np.array([4, 8, 50])):
        student = prune(teacher, (0, 3), head)
        hits, total = np.zeros(5), 0
        for sequence in HELD_OUT:
            logits = student_logits(student, sequence.tokens.tolist())
            for position in range(sequence.start - 1, len(sequence.tokens) - 1):
                guesses = head[logits[position].argsort(descending=True)[:5].numpy()].tolist()
                wanted = int(sequence.top_ids[position - sequence.start + 1, 0])
                hits += [wanted in guesses[: k + 1] for k in range(5)]
                total += 1
        found = measure_agreement(student, HELD_OUT)
        assert found.num_positions == total
        np.testing.assert_allclose(found.top, hits / total, rtol=1e-6)


class Killed(Exception):
    """The process died."""


def train(
    root: Path, teacher: Path, *, dies_at: int | None = None, recipe: Recipe = RECIPE, text: Lessons = CORPUS
) -> int:
    """One process: starts or resumes, may die behind a step of its own; a checkpoint every 3. Returns its steps."""
    steps: list[float] = []

    def on_step(_num_tokens: int, loss: float) -> None:
        steps.append(loss)
        if len(steps) == dies_at:
            raise Killed

    training = TrainingRun(new_distiller(teacher, text, recipe), text, SsmDirectory(root), clock=lambda: 0.0)
    training.finish(HELD_OUT, 3, on_step, lambda _: None)
    return len(steps)


def result(root: Path) -> tuple[dict[str, bytes], bytes]:
    """All of the checkpoint (history included) and the artefact's weights."""
    run = SsmDirectory(root)
    arrays = {name: array.tobytes() for name, array in read_archive(run.checkpoint).items()}
    return arrays, (run.artefact / "model.safetensors").read_bytes()


def test_killed_at_any_step_training_ends_the_same(teacher: Path, tmp_path: Path) -> None:
    """Behind step 1, 2, ... until it is never reached: resumed equals undisturbed, bit for bit."""
    num_steps = train(tmp_path / "whole", teacher)
    expected = result(tmp_path / "whole")
    assert num_steps > 7  # into the second epoch
    assert num_steps % 3  # the end has a checkpoint of its own
    assert read_log(SsmDirectory(tmp_path / "whole").checkpoint).marks[-1].num_steps == num_steps
    for step in range(1, num_steps + 1):
        root = tmp_path / str(step)
        with pytest.raises(Killed):
            train(root, teacher, dies_at=step)
        resumed = train(root, teacher)
        assert resumed == num_steps - (step - 1) // 3 * 3
        assert result(root) == expected


def test_killed_again_and_again_training_ends_the_same(teacher: Path, tmp_path: Path) -> None:
    """Each process manages four steps."""
    train(tmp_path / "whole", teacher)
    deaths = 0
    while True:
        try:
            train(tmp_path / "often", teacher, dies_at=4)
        except Killed:
            deaths += 1
        else:
            break
    assert deaths > 1
    assert result(tmp_path / "often") == result(tmp_path / "whole")


def test_a_finished_run_stays_as_it_is(teacher: Path, tmp_path: Path) -> None:
    """The same command again takes no step; a lost artefact is exported anew."""
    train(tmp_path, teacher)
    before = result(tmp_path)
    (tmp_path / "artefact" / "model.safetensors").unlink()
    assert train(tmp_path, teacher) == 0
    assert result(tmp_path) == before


def test_a_checkpoint_of_another_run_is_refused(teacher: Path, tmp_path: Path) -> None:
    """Naming the file and what differs."""
    train(tmp_path, teacher)
    other_recipe = dataclasses.replace(RECIPE, peak_lr=1e-4)
    with pytest.raises(ConfigError, match=r"checkpoint\.npz.*peak_lr"):
        train(tmp_path, teacher, recipe=other_recipe)
    other_text = even_lessons((*CORPUS.sequences[1:], CORPUS.sequences[0]))
    with pytest.raises(ConfigError, match=r"checkpoint\.npz.*text"):
        train(tmp_path, teacher, text=other_text)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_corrupt_checkpoint_is_refused(teacher: Path, tmp_path: Path, share: float) -> None:
    """Naming the file; it is not overwritten."""
    train(tmp_path, teacher)
    path = SsmDirectory(tmp_path).checkpoint
    broken = path.read_bytes()[: int(share * path.stat().st_size)]
    path.write_bytes(broken)
    with pytest.raises(ConfigError, match=r"checkpoint\.npz"):
        train(tmp_path, teacher)
    assert path.read_bytes() == broken


def test_a_shard_is_no_checkpoint(teacher: Path, tmp_path: Path) -> None:
    """An intact archive of something else is refused too."""
    np.savez(SsmDirectory(tmp_path).checkpoint, tokens=np.zeros(3))
    with pytest.raises(ConfigError, match=r"checkpoint\.npz: no checkpoint"):
        train(tmp_path, teacher)


def test_a_loss_that_is_no_number_stops_training(teacher: Path, tmp_path: Path) -> None:
    """Before a checkpoint could keep it."""
    distiller = new_distiller(teacher, CORPUS, RECIPE)
    with torch.no_grad():
        distiller.student.model.norm.weight.fill_(float("inf"))
    with pytest.raises(ConfigError, match="learning rate"):
        distiller.step()


def test_what_weighs_nothing_is_no_target() -> None:
    """Neither its log-probs nor its hidden state are used; a sequence of which nothing is left is not read."""
    sequences = random_sequences(3, VOCAB)
    weights = [np.zeros(len(each.top_ids), np.float32) for each in sequences]
    weights[0][1], weights[2][0] = 0.5, 1.0
    batch = collate(sequences, weights)
    assert batch.is_target.nonzero().tolist() == [[0, sequences[0].start], [2, sequences[2].start - 1]]
    assert batch.weights.tolist() == [0.5, 1.0]
    assert batch.top_ids.tolist() == [sequences[0].top_ids[1].tolist(), sequences[2].top_ids[0].tolist()]
    lessons = weighted_lessons(sequences, weights)
    assert [each.tokens.tolist() for each in lessons.sequences] == [sequences[idx].tokens.tolist() for idx in (0, 2)]


def test_hard_targets_are_the_best_token(teacher: Path) -> None:
    """The loss of a step is the cross-entropy with it alone."""
    recipe = dataclasses.replace(
        RECIPE, targets="hard", num_head_rows=VOCAB, temperature=1.0, batch_len=21, pool_len=21
    )
    distiller = new_distiller(teacher, CORPUS, recipe)
    batch = collate(CORPUS.sequences)
    with torch.no_grad():
        logits = distiller.student.logits(distiller.student(batch.tokens)[batch.is_target])
    distiller.step()
    assert distiller.mean_loss == pytest.approx(F.cross_entropy(logits, batch.top_ids[:, 0]).item(), rel=1e-4)


def test_an_artefact_can_be_bolder_than_its_student(teacher: Path, tmp_path: Path) -> None:
    """Its logits are the student's times the recipe's scale; training itself does not change."""
    scaled = dataclasses.replace(RECIPE, logit_scale=2.0)
    train(tmp_path / "plain", teacher)
    train(tmp_path / "bold", teacher, recipe=scaled)
    plain, bold = (read_student(tmp_path / name / "artefact", teacher) for name in ("plain", "bold"))
    tokens = CORPUS.sequences[0].tokens.tolist()
    torch.testing.assert_close(student_logits(bold, tokens), 2 * student_logits(plain, tokens))
    weights = [
        read_archive(SsmDirectory(tmp_path / name).checkpoint)["student/model.norm.weight"]
        for name in ("plain", "bold")
    ]
    assert np.array_equal(*weights)
