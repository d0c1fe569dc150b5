"""Students: the teacher's kin, or random, or a given checkpoint; and what they export loads."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from ssm_worker.boost.artefact import export_artefact, read_student
from ssm_worker.boost.corpus import TeacherSequence
from ssm_worker.boost.distil import Distiller, Recipe
from ssm_worker.boost.lessons import even_lessons
from ssm_worker.boost.start import (
    GivenCheckpoint,
    RandomLayers,
    choose_head_tokens,
    new_student,
    outer_layers,
    start_name,
)
from ssm_worker.boost.testing import prune, random_sequences, student_logits
from treecore.errors import ConfigError
from treecore.model.batch import ForwardBatch, Segment
from treecore.model.decoder import Decoder
from treecore.model.load import load_decoder
from treecore.testing.checkpoints import TINY, write_tiny_llama

VOCAB = TINY["vocab_size"]
ALL_TOKENS = np.arange(VOCAB)
CORPUS = even_lessons(random_sequences(21, VOCAB))
RECIPE = Recipe(start="layers 0,3", llm="", num_head_rows=50, token_visits=CORPUS.num_positions, batch_len=3)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


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
