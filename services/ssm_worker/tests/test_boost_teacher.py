"""The teacher's writing: what it writes, that it is repeatable, and that its log-probs are the model's."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from ssm_worker.boost.corpus import TeacherSequence
from ssm_worker.boost.dialogue import Answers, Dialogue, Mixture, Plan, plan_answer, plan_dialogue
from ssm_worker.boost.generate import choose_prompts, write
from ssm_worker.boost.teacher import Teacher, Written
from ssm_worker.boost.testing import write_tiny_teacher
from ssm_worker.boost.turns import TeacherText, Turns, read_openers, read_prompts
from treecore.errors import ConfigError
from treecore.model.batch import ForwardBatch
from treecore.model.decoder import Decoder
from treecore.model.kv_pool import KvPool
from treecore.model.load import load_decoder
from treecore.noise import Seed, gumbel

MIXTURE = Mixture(max_prompt_len=6, answers=Answers(greedy=0.55, max_len=8))
END = 2


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny instruct model."""
    return write_tiny_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def text(teacher_dir: Path) -> TeacherText:
    """Its text side."""
    return TeacherText(teacher_dir, (END,))


def plans(text: TeacherText, seed: int, count: int) -> list[Plan]:
    """The first dialogues of a seed; short ones, half of them with an opener."""
    openers = [text.encode("Why"), text.encode("Say\n")]
    return [plan_dialogue(index, seed, text.turns, openers, MIXTURE) for index in range(count)]


def new_teacher(teacher_dir: Path, text: TeacherText, num_rows: int) -> Teacher:
    """A teacher with room for MIXTURE's dialogues."""
    row_len = MIXTURE.row_len(text.turns, [text.encode("Say\n")])
    return Teacher(load_decoder(teacher_dir, dtype="float32"), text.turns, num_rows, row_len, num_top=7)


def by_index(written: Iterable[Written]) -> list[TeacherSequence]:
    """In the order of the plans."""
    return [entry.sequence for entry in sorted(written, key=lambda entry: entry.index)]


def reference_logp(teacher_dir: Path, tokens: np.ndarray) -> torch.Tensor:
    """Transformers' log-probs after every token: fp32 [L, V]."""
    model = LlamaForCausalLM.from_pretrained(teacher_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].log_softmax(-1)


def test_the_template_is_cut_around_the_users_words(text: TeacherText) -> None:
    """With and without a system prompt; the user's turn is closed by the template."""
    assert text.turns.opening == text.encode("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n")
    assert text.turns.bare_opening == text.encode("<|im_start|>user\n")
    assert text.turns.close == text.encode("<|im_end|>\n<|im_start|>assistant\n")
    assert text.turns.end == END
    assert text.turns.special == {0, 1, 2}


def test_a_bos_token_stays_in_front_of_the_bare_opening(tmp_path: Path) -> None:
    """A template that begins with one (Llama 3) means it for every dialogue."""
    directory = write_tiny_teacher(tmp_path)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["bos_token"] = "<|endoftext|>"
    config["chat_template"] = "<|endoftext|>" + config["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    text = TeacherText(directory, (END,))
    assert text.turns.bare_opening == text.encode("<|endoftext|><|im_start|>user\n")


@pytest.mark.parametrize("template", [None, "fixed", "{{ messages[0].content }}", "{{ broken", "{{ 1 / 0 }}"])
def test_an_unusable_template_is_refused(tmp_path: Path, template: str | None) -> None:
    """In one line that names the teacher."""
    directory = write_tiny_teacher(tmp_path)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
    with pytest.raises(ConfigError, match="chat template") as error:
        TeacherText(directory, (END,))
    assert "\n" not in str(error.value)


def test_a_teacher_without_tokenizer_or_end_is_refused(tmp_path: Path) -> None:
    """Both by name."""
    directory = write_tiny_teacher(tmp_path)
    with pytest.raises(ConfigError, match="eos_token_id"):
        TeacherText(directory, ())
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        TeacherText(directory, (END,))
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        TeacherText(directory, (END,))


def test_openers_are_many_and_keep_their_line_breaks() -> None:
    """The variety of prompts hangs on them."""
    openers = read_openers()
    assert len(openers) > 100
    assert "Summarize the following text:\n" in openers
    assert "Question: " in openers


def test_prompts_are_read_or_the_line_is_named(tmp_path: Path) -> None:
    """A field `prompt` on every line."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "id": 1}\n\n{"prompt": "b"}\n')
    assert read_prompts(path) == ["a", "b"]
    for line in ("{", "[]", "{}", '{"prompt": 3}', '{"prompt": ""}'):
        path.write_text('{"prompt": "a"}\n' + line)
        with pytest.raises(ConfigError, match=r"prompts\.jsonl:2"):
            read_prompts(path)
    with pytest.raises(ConfigError, match="absent"):
        read_prompts(tmp_path / "absent.jsonl")


TURNS = Turns(opening=(1, 9, 2, 1, 8), bare_opening=(1, 8), close=(2, 1, 7), end=2, special=frozenset({0, 1, 2}))


@given(data=st.data(), index=st.integers(0, 50))
@settings(max_examples=200, deadline=None)
def test_any_dialogue_keeps_its_shape(data: st.DataObject, index: int) -> None:
    """Whatever the model says: opening, words, close, words, perhaps an end, within the limits and the row."""
    openers: list[tuple[int, ...]] = [(11,), tuple(range(20, 29))]
    plan = plan_dialogue(index, 3, TURNS, openers, MIXTURE)
    dialogue = Dialogue(plan, TURNS)
    over = False
    while not over:
        wanted = dialogue.wants_token
        over = dialogue.feed(data.draw(st.integers(0, 40)) if wanted else None)
    prompt, close, answer = split_at(dialogue.tokens[plan.start :], list(TURNS.close))
    assert dialogue.num_fed == len(dialogue.tokens) <= MIXTURE.row_len(TURNS, openers)
    assert close
    assert not TURNS.special & set(prompt)
    assert not TURNS.special & set(answer[:-1])
    assert 1 <= len(answer) <= MIXTURE.answers.max_len
    assert answer[-1] == END or len(answer) == MIXTURE.answers.max_len
    assert len(prompt) <= max(MIXTURE.max_prompt_len, len(plan.forced) - plan.start)


def split_at(tokens: list[int], mark: list[int]) -> tuple[list[int], bool, list[int]]:
    """What is before and behind the first `mark`."""
    for at in range(len(tokens)):
        if tokens[at : at + len(mark)] == mark:
            return tokens[:at], True, tokens[at + len(mark) :]
    return tokens, False, []


def test_log_probs_are_the_models(teacher_dir: Path, text: TeacherText) -> None:
    """Every recorded position, against an independent forward over the finished dialogue; greedy answers are greedy."""
    written = by_index(new_teacher(teacher_dir, text, 3).write(plans(text, 0, 8)))
    for sequence in written:
        expected = reference_logp(teacher_dir, sequence.tokens)[sequence.start - 1 :].topk(7)
        assert np.array_equal(sequence.top_ids, expected.indices.numpy())
        np.testing.assert_allclose(sequence.top_logp, expected.values.numpy(), rtol=1e-3, atol=1e-3)
    assert {sequence.temperature for sequence in written} - {0.0}
    for sequence in written:
        if sequence.temperature == 0:
            assert_answer_is_greedy(sequence, text.turns)


def assert_answer_is_greedy(sequence: TeacherSequence, turns: Turns) -> None:
    """Each of the answer's tokens is the best one; a special one ends the answer."""
    prompt, _, answer = split_at(sequence.tokens[sequence.start :].tolist(), list(turns.close))
    first = len(prompt) + len(turns.close)
    best = sequence.top_ids[first : first + len(answer), 0].tolist()
    assert answer == [END if token in turns.special else token for token in best]


def test_words_are_drawn_at_their_temperature(teacher_dir: Path, text: TeacherText) -> None:
    """Prompts at 1, answers at the plan's: every token is argmax(log p / T + G(seed, position, .)) of the reference."""
    asked = plans(text, 0, 12)
    for plan, sequence in zip(asked, by_index(new_teacher(teacher_dir, text, 4).write(asked)), strict=True):
        tokens = sequence.tokens.tolist()
        logp = reference_logp(teacher_dir, sequence.tokens).numpy()
        prompt, _, answer = split_at(tokens[plan.start :], list(text.turns.close))
        answer_start = len(tokens) - len(answer)
        for position in range(len(plan.forced), plan.start + len(prompt)):
            assert tokens[position] == drawn(logp[position - 1], 1.0, plan.seed, position)
        for position in range(answer_start, len(tokens)):
            token = drawn(logp[position - 1], plan.temperature, plan.seed, position)
            assert tokens[position] == (END if token in text.turns.special else token)


def drawn(logp: NDArray[np.float32], temperature: float, seed: Seed, position: int) -> int:
    """Architecture section 4, as it reads."""
    if temperature == 0:
        return int(logp.argmax())
    return int((logp / temperature + gumbel(seed, position, np.arange(len(logp), dtype=np.int32))).argmax())


def test_text_is_a_function_of_the_seed(teacher_dir: Path, text: TeacherText) -> None:
    """Not of how many dialogues are written at a time, nor of which; another seed writes other text."""
    alone = by_index(new_teacher(teacher_dir, text, 1).write(plans(text, 0, 6)))
    together = by_index(new_teacher(teacher_dir, text, 5).write(plans(text, 0, 6)))
    late = by_index(new_teacher(teacher_dir, text, 2).write(plans(text, 0, 6)[3:]))
    other = by_index(new_teacher(teacher_dir, text, 5).write(plans(text, 1, 6)))
    texts = [[sequence.tokens.tolist() for sequence in series] for series in (alone, together, late, other)]
    assert texts[0] == texts[1]
    assert texts[2] == texts[0][3:]
    assert texts[3] != texts[0]


class CountingDecoder:
    """A decoder that notes how many rows each forward has."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.spec, self.new_pool = decoder.spec, decoder.new_pool
        self.num_rows: list[int] = []

    def forward(self, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        """See Decoder.forward."""
        self.num_rows.append(len(batch.tokens))
        return self._decoder.forward(batch, pool)


def test_the_same_plans_give_the_same_bits(teacher_dir: Path, text: TeacherText) -> None:
    """Whatever a teacher wrote before: the same forwards, log-probs too. So a killed run ends like another."""
    decoder = CountingDecoder(load_decoder(teacher_dir, dtype="float32"))
    teacher = Teacher(decoder, text.turns, 3, MIXTURE.row_len(text.turns, [text.encode("Say\n")]), num_top=7)  # type: ignore[arg-type]
    written, forwards = [], []
    for seed in (0, 1, 0):
        decoder.num_rows.clear()
        written.append(by_index(teacher.write(plans(text, seed, 6))))
        forwards.append([*decoder.num_rows])
    assert forwards[0] == forwards[2] != forwards[1]
    for left, right in zip(written[0], written[2], strict=True):
        assert left.top_logp.tobytes() == right.top_logp.tobytes()
        assert left.top_ids.tobytes() == right.top_ids.tobytes()


def test_a_teacher_that_is_told_to_stop_can_start_again(teacher_dir: Path, text: TeacherText) -> None:
    """Its rows and its cache are free again."""
    teacher = new_teacher(teacher_dir, text, 3)
    writing = teacher.write(plans(text, 0, 6))
    next(writing)
    writing.close()  # type: ignore[attr-defined]
    again = by_index(teacher.write(plans(text, 0, 6)))
    fresh = by_index(new_teacher(teacher_dir, text, 3).write(plans(text, 0, 6)))
    assert [sequence.tokens.tolist() for sequence in again] == [sequence.tokens.tolist() for sequence in fresh]


def test_dialogues_beyond_the_context_are_refused(teacher_dir: Path, text: TeacherText) -> None:
    """At the start, not in the middle."""
    with pytest.raises(ConfigError, match="context of 512"):
        Teacher(load_decoder(teacher_dir, dtype="float32"), text.turns, 1, 513)


def test_held_out_answers_are_greedy_and_in_order(teacher_dir: Path, text: TeacherText) -> None:
    """All of the template and the prompt count as the opening: only the answer is measured."""
    prompts = [text.encode(word) for word in ("Why?", "How are you", "Go")]
    asked = [plan_answer(index, prompt, 0, text.turns, Answers(max_len=5)) for index, prompt in enumerate(prompts)]
    done: list[TeacherSequence] = []
    shard = write(new_teacher(teacher_dir, text, 2), asked, done.append, clock=lambda: 0.0)
    assert len(done) == 3
    assert [sequence.start for sequence in shard.sequences] == [len(plan.forced) for plan in asked]
    assert {sequence.temperature for sequence in shard.sequences} == {0.0}
    for plan, sequence in zip(asked, shard.sequences, strict=True):
        assert tuple(sequence.tokens[: plan.start].tolist()) == plan.forced
        assert 0 < sequence.num_tokens <= 5


def test_completions_are_drawn_at_a_mixture_of_temperatures(text: TeacherText) -> None:
    """The share of greedy ones is about the one asked for (false alarm below 1e-6), the others have all of them."""
    answers = Answers(greedy=0.65, temperatures=(0.5, 1.0))
    found = [plan_answer(index, (9,), 3, text.turns, answers).temperature for index in range(1000)]
    assert abs(found.count(0.0) - 650) < 76
    assert set(found) == {0.0, 0.5, 1.0}
    assert found == [plan_answer(index, (9,), 3, text.turns, answers).temperature for index in range(1000)]


def test_prompts_are_chosen_by_lot(text: TeacherText) -> None:
    """The same for a seed, without repetition, none too long or empty."""
    prompts = [tuple(range(length)) for length in range(20)]
    chosen = choose_prompts(prompts, 5, 12, seed=3)
    assert chosen == choose_prompts(prompts, 5, 12, seed=3) != choose_prompts(prompts, 5, 12, seed=4)
    assert len(set(chosen)) == 5
    assert all(0 < len(prompt) < 12 for prompt in chosen)
    with pytest.raises(ConfigError, match="11 have fewer"):
        choose_prompts(prompts, 12, 12, seed=3)
