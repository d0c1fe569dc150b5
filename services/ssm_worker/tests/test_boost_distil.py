"""Distillation: the student is the teacher's kin, it learns, a kill changes nothing, and what it exports loads."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from ssm_worker.boost.agreement import measure_agreement
from ssm_worker.boost.archive import read_archive
from ssm_worker.boost.artefact import export_artefact, read_student
from ssm_worker.boost.batches import BatchOrder, TrainingBatch, collate
from ssm_worker.boost.checkpoint import read_log
from ssm_worker.boost.corpus import TeacherSequence
from ssm_worker.boost.distil import Distiller, Recipe, distillation_loss
from ssm_worker.boost.lessons import Lessons, even_lessons, weighted_lessons
from ssm_worker.boost.start import (
    GivenCheckpoint,
    KeptLayers,
    RandomLayers,
    choose_head_tokens,
    new_student,
    outer_layers,
    start_name,
)
from ssm_worker.boost.student import Student, column_of_token
from ssm_worker.boost.testing import random_sequences
from ssm_worker.boost.training import SsmDirectory, TrainingRun
from treecore.errors import ConfigError
from treecore.model.batch import ForwardBatch, Segment
from treecore.model.decoder import Decoder
from treecore.model.load import load_decoder
from treecore.testing.checkpoints import TINY, write_tiny_llama

VOCAB = TINY["vocab_size"]
ALL_TOKENS = np.arange(VOCAB)
CORPUS = even_lessons(random_sequences(21, VOCAB))
HELD_OUT = random_sequences(9, VOCAB, seed=1)
RECIPE = Recipe(
    start="layers 0,3", llm="", num_head_rows=50, token_visits=CORPUS.num_positions + 90, batch_len=3, pool_len=6
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of four layers."""
    return write_tiny_llama(tmp_path_factory.mktemp("teacher"), num_hidden_layers=4)


def prune(llm: Path, layers: tuple[int, ...], head: np.ndarray) -> Student:
    """The LLM's layers and those rows of its head."""
    return new_student(llm, KeptLayers(layers), head, 0)


def new_distiller(llm: Path, lessons: Lessons, recipe: Recipe) -> Distiller:
    """The start of a run."""
    return Distiller(prune(llm, (0, 3), np.arange(recipe.num_head_rows)), lessons, recipe)


def student_logits(student: Student, tokens: Sequence[int]) -> Tensor:
    """[L, V_out] of one sequence."""
    with torch.no_grad():
        return student.logits(student(torch.tensor([list(tokens)])))[0]


def decoder_logits(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """The same by the project's own decoder, in one prefill."""
    rows = np.arange(len(tokens))
    segment = Segment(np.array(tokens), rows, rows, rows, rows, np.tri(len(tokens), dtype=np.bool_), rows)
    return decoder.forward(ForwardBatch.from_segments([segment]), decoder.new_pool(len(tokens)))


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": False, "rope_scaling": LLAMA3},
        {"num_key_value_heads": 4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-3},
    ],
)
def test_a_student_of_all_layers_is_the_teacher(tmp_path: Path, overrides: dict[str, Any]) -> None:
    """With the full head its logits are the teacher's, by transformers and by our decoder, for any Llama."""
    directory = write_tiny_llama(tmp_path, **overrides)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
    found = student_logits(prune(directory, (0, 1), ALL_TOKENS), tokens)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(found, model(torch.tensor([tokens])).logits[0], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(
        found, decoder_logits(load_decoder(directory, dtype="float32"), tokens), atol=2e-4, rtol=1e-4
    )


def test_a_pruned_student_has_the_layers_that_were_kept(teacher: Path) -> None:
    """In their order, numbered anew; the head has the rows that were asked for."""
    head = np.array([1, 4, 60])
    student = prune(teacher, (0, 3), head)
    weights = load_file(teacher / "model.safetensors")
    state = student.state_dict()
    assert torch.equal(state["model.layers.1.mlp.up_proj.weight"], weights["model.layers.3.mlp.up_proj.weight"])
    assert torch.equal(student.vocabulary.head, weights["model.embed_tokens.weight"][head])
    assert "model.layers.2.mlp.up_proj.weight" not in state


@pytest.mark.parametrize("layers", [(4,), (0, 4)])
def test_layers_that_are_not_there_are_refused(teacher: Path, layers: tuple[int, ...]) -> None:
    """The message says which there are."""
    with pytest.raises(ConfigError, match="layers 0 to 3"):
        prune(teacher, layers, ALL_TOKENS)


@pytest.mark.parametrize(("num_layers", "kept"), [(30, (0, 1, 28, 29)), (4, (0, 1, 2, 3)), (3, (0, 1, 2)), (1, (0,))])
def test_the_outer_layers_are_kept(num_layers: int, kept: tuple[int, ...]) -> None:
    """Two at each end, none twice."""
    assert outer_layers(num_layers) == kept


@pytest.mark.parametrize("tied", [True, False])
def test_the_artefact_loads_and_says_what_the_student_says(tmp_path: Path, tied: bool) -> None:
    """load_decoder with the teacher's embedding gives the exported student's logits, on the trimmed head's tokens."""
    directory = write_tiny_llama(tmp_path / "teacher", num_hidden_layers=4, tie_word_embeddings=tied)
    distiller = Distiller(prune(directory, (0, 3), np.arange(3, 53)), CORPUS, RECIPE)
    distiller.step()
    export_artefact(distiller.student, tmp_path / "ssm")
    decoder = load_decoder(tmp_path / "ssm", dtype="float32", embedding_from=directory)
    served = read_student(tmp_path / "ssm", directory)
    tokens = CORPUS.sequences[0].tokens.tolist()
    found = decoder_logits(decoder, tokens)
    assert decoder.output_token_ids is not None
    assert decoder.output_token_ids.tolist() == list(range(3, 53))
    torch.testing.assert_close(found, student_logits(served, tokens), atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(found, student_logits(distiller.student, tokens), atol=0.3, rtol=0.05)  # bf16 weights
    assert decoder.spec.eos_token_ids == (2,)


def test_the_artefact_keeps_to_the_format(teacher: Path, tmp_path: Path) -> None:
    """bf16 layers, int32 ids, no embedding; config.json names the borrowed embedding."""
    export_artefact(prune(teacher, (0, 3), np.array([1, 2, 9])), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    ids = tensors.pop("espalier.head_token_ids")
    assert (ids.dtype, ids.tolist()) == (torch.int32, [1, 2, 9])
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert {name.split(".")[1] for name in tensors} == {"layers", "norm"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["espalier"] == {"teacher_embedding": True}
    assert config["num_hidden_layers"] == 2


def test_generation_config_decides_the_end_in_the_artefact_too(tmp_path: Path) -> None:
    """The artefact has no generation_config.json, so that its config.json must say it."""
    directory = write_tiny_llama(tmp_path / "teacher")
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    export_artefact(prune(directory, (0, 1), ALL_TOKENS), tmp_path / "ssm")
    assert load_decoder(tmp_path / "ssm", dtype="float32", embedding_from=directory).spec.eos_token_ids == (7, 8)


def test_what_is_no_artefact_or_no_teacher_is_refused(teacher: Path, tmp_path: Path) -> None:
    """A plain checkpoint has no trimmed head; an artefact has no embedding to give."""
    other = write_tiny_llama(tmp_path / "other", vocab_size=7)
    with pytest.raises(ConfigError, match="vocab_size=7"):
        read_student(other, teacher)
    wide = write_tiny_llama(tmp_path / "wide", hidden_size=48)
    export_artefact(prune(wide, (0,), ALL_TOKENS), tmp_path / "of-wide")
    with pytest.raises(ConfigError, match="no SSM artefact that fits"):
        read_student(tmp_path / "of-wide", teacher)
    export_artefact(prune(teacher, (0, 3), ALL_TOKENS), tmp_path)
    with pytest.raises(ConfigError, match="artefact itself"):
        prune(tmp_path, (0,), ALL_TOKENS)


def test_the_head_has_what_is_expected_most_and_what_must_be_there() -> None:
    """Tokens by their probability among the best five; an end token even if it never occurred."""
    sequence = TeacherSequence(
        tokens=np.array([3, 3, 5], np.int32),
        start=1,
        temperature=0.0,
        top_ids=np.array([[9, 8]] * 3, np.int32),
        top_logp=np.log(np.array([[0.9, 0.1]] * 3)).astype(np.float16),
    )
    assert choose_head_tokens([sequence], 12, 4, {11}).tolist() == [3, 5, 9, 11]
    assert choose_head_tokens([sequence], 12, 5, {11}).tolist() == [3, 5, 8, 9, 11]
    assert choose_head_tokens([sequence], 12, 6, ()).tolist() == [0, 1, 3, 5, 8, 9]  # ties: low ids
    assert choose_head_tokens([sequence], 12, 99, ()).tolist() == list(range(12))


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


def test_a_random_student_is_served_as_it_is(teacher: Path, tmp_path: Path) -> None:
    """Any shape between the LLM's embedding and head, the same for a seed; the artefact tells its shape."""
    start = RandomLayers(3, 6, 3, 20)
    student, same, other = (new_student(teacher, start, np.arange(40), seed) for seed in (1, 1, 2))
    assert student.spec.num_layers == 3
    assert torch.equal(student.model.layers[2].mlp.up_proj.weight, same.model.layers[2].mlp.up_proj.weight)
    assert not torch.equal(student.model.layers[2].mlp.up_proj.weight, other.model.layers[2].mlp.up_proj.weight)
    export_artefact(student, tmp_path / "ssm")
    decoder = load_decoder(tmp_path / "ssm", dtype="float32", embedding_from=teacher)
    tokens = CORPUS.sequences[0].tokens.tolist()
    served = read_student(tmp_path / "ssm", teacher)
    torch.testing.assert_close(decoder_logits(decoder, tokens), student_logits(served, tokens), atol=2e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="--shape"):
        new_student(teacher, RandomLayers(1, 4, 3, 8), ALL_TOKENS, 0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_small_checkpoint_keeps_its_own_vocabulary(teacher: Path, tmp_path: Path, tied: bool) -> None:
    """It is trained between its own embedding and head, and exported as a plain checkpoint."""
    small = write_tiny_llama(tmp_path / "small", hidden_size=16, head_dim=4, seed=5, tie_word_embeddings=tied)
    start = GivenCheckpoint(small)
    distiller = Distiller(new_student(teacher, start, ALL_TOKENS, 0), CORPUS, RECIPE)
    distiller.step()
    export_artefact(distiller.student, tmp_path / "ssm")
    assert "espalier" not in json.loads((tmp_path / "ssm" / "config.json").read_text())
    decoder = load_decoder(tmp_path / "ssm", dtype="float32")
    tokens = CORPUS.sequences[0].tokens.tolist()
    served = read_student(tmp_path / "ssm", teacher)
    torch.testing.assert_close(decoder_logits(decoder, tokens), student_logits(served, tokens), atol=2e-4, rtol=1e-4)
    assert start_name(start) != start_name(GivenCheckpoint(teacher))


def test_an_artefact_can_be_trained_on(teacher: Path, tmp_path: Path) -> None:
    """Its layers, as they are served, are the start; its head stays."""
    student = prune(teacher, (0, 3), np.array([1, 2, 9]))
    export_artefact(student, tmp_path)
    again = new_student(teacher, GivenCheckpoint(tmp_path), ALL_TOKENS, 0)
    assert again.vocabulary.head_token_ids.tolist() == [1, 2, 9]
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, student.state_dict()[name].bfloat16().float())


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
