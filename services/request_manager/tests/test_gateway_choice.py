"""One choice's tokens to text: stop strings, EOS, cuts. Several choices side by side."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from request_manager.contract import FinishReason, Generation, ModelCard, TokenDelta, TokenLogprob
from request_manager.gateway.choice import ChoiceDelta, ChoiceText, choice_deltas, side_by_side
from request_manager.gateway.stop import StopScanner
from request_manager.gateway.testing import END, tiny_codec, tiny_tokenizer
from request_manager.testing import HANG, ScriptedManager, deltas, made_up_logprob
from treecore.errors import EspalierError, Overloaded
from treecore.messages import RequestId
from treecore.noise import Seed
from treecore.params import SamplingParams

CODEC = tiny_codec()
TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.token_to_id(END)
CARD = ModelCard("tiny", TOKENIZER.get_vocab_size(), 64, (EOS,), 16)


def ids(text: str) -> list[int]:
    """Tokens of a text."""
    return TOKENIZER.encode(text).ids


def generation(name: str = "r") -> Generation:
    """Any valid generation."""
    return Generation(RequestId(name), np.array([1], np.int32), SamplingParams(0.0, 0, 1.0, Seed(0)), 8)


def run(
    told: Sequence[TokenDelta], stops: Sequence[str] = (), min_tokens: int = 0, echo: str = ""
) -> list[ChoiceDelta]:
    """What a choice makes of deltas, up to its finish reason."""
    text = ChoiceText(CODEC, stops, min_tokens, echo)
    said: list[ChoiceDelta] = []
    for delta in told:
        said.append(text.advance(delta))
        if said[-1].finish_reason is not None:
            break
    return said


def summary(said: list[ChoiceDelta]) -> tuple[str, list[int], FinishReason | None]:
    """Text, counted tokens and finish reason of a whole choice."""
    tokens = [token for delta in said for token in delta.tokens]
    return "".join(delta.text for delta in said), tokens, said[-1].finish_reason


def logprobs_of(said: list[ChoiceDelta]) -> list[float]:
    """The log-probability of each token that has one."""
    return [entry.said.logprob for delta in said for entry in delta.logprobs]


# Bytes that complete or spoil any UTF-8 prefix: text on which all of these continuations agree is certain.
_FIRST = (0x41, 0x80, 0x90, 0x9F, 0xA0, 0xBF)
_ID_OF_BYTE = {bytes_[0]: id_ for id_, bytes_ in CODEC._vocabulary.pieces.items() if len(bytes_) == 1}
_CONTINUATIONS = [[], *([_ID_OF_BYTE[first], *[_ID_OF_BYTE[0x80]] * more] for first in _FIRST for more in range(3))]


def certain_text(tokens: list[int]) -> str:
    """By brute force: what any continuation leaves as it is."""
    columns = zip(*(TOKENIZER.decode(tokens + more) for more in _CONTINUATIONS), strict=False)
    return "".join(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def first_stop(text: str, stops: Sequence[str], behind: int = 0) -> str | None:
    """The text before the stop string that completes first `behind` so many characters, the longest if several do."""
    for end in range(behind + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return None


def oracle(
    tokens: list[int], stops: Sequence[str], min_tokens: int, reason: FinishReason
) -> tuple[str, list[int], FinishReason]:
    """The whole rule, slowly: after each token decode everything again and look for stop strings from the start."""
    spoken = tokens[: len(tokens) - (reason == "stop")]
    exempt = ""  # what was certain before there were min_tokens tokens
    for count in range(1, len(spoken) + 1):
        text = certain_text(spoken[:count])
        if count < min_tokens:
            exempt = text
            continue
        cut = first_stop(text, stops, len(exempt))
        if cut is not None:
            return cut, tokens[:count], "stop"
    text = TOKENIZER.decode(spoken)
    cut = first_stop(text, stops, len(exempt)) if len(spoken) >= min_tokens else None
    return (text, tokens, reason) if cut is None else (cut, tokens, "stop")


TRAPS = [*ids("hello wo é😀ab"), EOS, *(_ID_OF_BYTE[byte] for byte in b"\xf0\x9f\xe2\x82ab ")]


def draw_stops(data: st.DataObject, tokens: list[int]) -> list[str]:
    """Pieces of the text, some with a character more, so that most are met, nearly met, or met at the very end."""
    text = TOKENIZER.decode(tokens) + "a"
    piece = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 3)).map(lambda cut: text[cut[0] : sum(cut)])
    return data.draw(st.lists(st.builds(str.__add__, piece, st.sampled_from(["", "", "b", "é"])), max_size=4))


@given(st.lists(st.sampled_from(TRAPS), min_size=1, max_size=10), st.data())
def test_any_cut_gives_the_same_answer(tokens: list[int], data: st.DataObject) -> None:
    """Text, counted tokens and finish reason do not depend on how steps cut the tokens, and are the oracle's."""
    cuts = data.draw(st.lists(st.integers(1, 4), max_size=len(tokens)))
    stops = draw_stops(data, tokens)
    min_tokens = data.draw(st.sampled_from([0, 0, 2, 5, len(tokens) - 1]))
    reason: FinishReason = data.draw(st.sampled_from(["length", "stop"]))
    said = run(deltas(tokens, cuts, reason, 2), stops, min_tokens)
    assert summary(said) == oracle(tokens, stops, min_tokens, reason)
    counted = [token for delta in said for token in delta.tokens]
    assert logprobs_of(said) == [made_up_logprob(token, 2).logprob for token in counted]


@given(st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4))
def test_scanner_holds_back_no_more_than_it_must(text: str, stops: list[str]) -> None:
    """After each character exactly the longest suffix that begins a stop string is held back."""
    scanner, said = StopScanner(stops), ""
    for end, char in enumerate(text, 1):
        said += scanner.feed(char)
        if scanner.hit:
            assert said == first_stop(text, stops)
            return
        prefixes = [
            stop[:length] for stop in stops for length in range(len(stop)) if text[:end].endswith(stop[:length])
        ]
        assert said == text[: end - max(map(len, prefixes), default=0)]
    assert said + scanner.flush() == text


def test_stop_inside_a_run_that_is_also_the_last() -> None:
    """Case 7: the run that reaches max_tokens completes a stop string: reason stop, no text and no token behind it."""
    tokens = ids("ab STOP tail")
    said = run([TokenDelta(tuple(tokens), "length", 1)], ["STOP"])
    assert summary(said) == ("ab ", tokens[: len(ids("ab STOP"))], "stop")


def test_stop_completed_by_the_very_last_token() -> None:
    """Case 7: max_tokens and the stop string in the same token."""
    tokens = ids("ab STOP")
    assert summary(run([TokenDelta(tuple(tokens), "length", 1)], ["STOP"])) == ("ab ", tokens, "stop")


@pytest.mark.parametrize("end", [EOS, *ids("c")])
def test_what_ended_the_output_is_counted_and_no_text(end: int) -> None:
    """Case 8: the token of a `stop`, an EOS or a stop token that has a text, even one that a stop string waits for."""
    tokens = [*ids("ab"), end]
    assert summary(run([TokenDelta(tuple(tokens), "stop", 1)], ["bc"])) == ("ab", tokens, "stop")


def test_an_ignored_eos_does_not_end_the_text() -> None:
    """Only the manager knows what ends an output: text goes on behind an EOS that did not."""
    tokens = [*ids("ab"), EOS, *ids("cd")]
    assert summary(run([TokenDelta(tuple(tokens), "length", 1)])) == ("abcd", tokens, "length")


def test_nothing_remains_behind_a_stop_string() -> None:
    """Case 9: tokens, log-probabilities and accepted tokens behind it are cut; those of its own remain, as they are."""
    tokens = ids("ab STOP tail")
    kept = tokens[: len(ids("ab STOP"))]
    (said,) = run(deltas(tokens, [len(tokens)], "length", 1), ["STOP"])
    assert said.tokens == tuple(kept)
    assert said.num_accepted == len(kept) < len(tokens) - 1
    assert logprobs_of([said]) == [made_up_logprob(token, 1).logprob for token in kept]
    assert [entry.offset for entry in said.logprobs] == list(range(len("ab STOP")))


def test_a_stop_string_before_min_tokens_is_text() -> None:
    """Case 6: its text stays, also where it overlaps with the one that stops; the count is in tokens, not steps."""
    tokens = ids("aXaXa")
    for cuts in ([], [1, 2], [1] * 5):
        assert summary(run(deltas(tokens, cuts, "length"), ["aXa"], 4)) == ("aX", tokens, "stop")
        assert summary(run(deltas(tokens, cuts, "length"), ["aXa"], 3)) == ("", tokens[:3], "stop")


def test_an_echo_is_in_front_and_holds_no_stop_string() -> None:
    """It is told with the first delta, whatever is held back."""
    said = run(deltas(ids("cd"), [1], "length"), ["bc", "d"], echo="abc")
    assert [delta.text for delta in said] == ["abcc", ""]


def test_a_token_with_part_of_a_character_has_its_entry_at_once() -> None:
    """Every token's entry comes once, with its delta, in bytes; the text follows when the character is whole."""
    tokens = ids("a😀b")
    said = run(deltas(tokens, [1] * 9, "length", 0))
    assert [len(delta.logprobs) for delta in said] == [1] * len(tokens)
    entries = [entry for delta in said for entry in delta.logprobs]
    assert b"".join(entry.said.raw for entry in entries).decode() == "a😀b"
    assert [entry.said.text for entry in entries[:2]] == ["a", "bytes:\\xf0\\x9f"]
    assert [entry.offset for entry in entries] == [0, *[1] * (len(tokens) - 2), 2]


def test_half_a_stop_string_at_the_end_is_text() -> None:
    """Case 19: held back while it could become a stop string, told when it cannot any more."""
    tokens = ids("ab STO")
    assert summary(run(deltas(tokens, [5], "length"), ["STOP"])) == ("ab STO", tokens, "length")
    assert summary(run([TokenDelta((*tokens, EOS), "stop", 1)], ["STOP"])) == ("ab STO", [*tokens, EOS], "stop")


def test_the_end_of_a_broken_character_may_complete_a_stop_string() -> None:
    """The replacement character is text like any other, also when only the end makes it certain."""
    tokens = ids("ab😀")[:-1]
    assert summary(run([TokenDelta(tuple(tokens), "length", 1)], ["\ufffd"])) == ("ab", tokens, "stop")


def test_of_two_stop_strings_the_longer_cuts() -> None:
    """Both complete on the same character; what begins first is not text."""
    assert summary(run([TokenDelta(tuple(ids("abcd")), "length", 1)], ["c", "bc"]))[0] == "a"


@pytest.mark.parametrize("cut", range(1, 8))
def test_the_last_tokens_of_a_stream_are_not_missing(cut: int) -> None:
    """Case 19: what was held back for a stop string or a character is told at the end, as in the whole text."""
    tokens = ids("é😀 STO")[:-1] + ids("O") + ids("😀")[:2]
    text, _, reason = summary(run(deltas(tokens, [cut], "length"), ["STOP"]))
    assert (text, reason) == (TOKENIZER.decode(tokens), "length")
    assert text.endswith("\ufffd")


async def test_the_generation_is_cancelled_at_a_stop_string() -> None:
    """A complete text cancels the rest of the generation at once."""
    manager = ScriptedManager(CARD, lambda _: [TokenDelta(tuple(ids("ab")), None, 1), HANG])
    said = [delta async for delta in choice_deltas(manager, generation(), ChoiceText(CODEC, ["b"]))]
    assert summary(said)[0] == "a"
    assert manager.ended == [("r", True)]


async def test_a_generation_without_an_end_is_our_error() -> None:
    """A manager that stops in the middle must not look like a complete answer."""
    manager = ScriptedManager(CARD, lambda _: [TokenDelta((1,), None, 1)])
    with pytest.raises(EspalierError, match="without a finish reason"):
        await drained(choice_deltas(manager, generation(), ChoiceText(CODEC)))


async def test_missing_logprobs_are_our_error() -> None:
    """Case 9: better no answer than one whose log-probabilities are made up or belong to other tokens."""
    logprob = TokenLogprob(-1.0, ())
    manager = ScriptedManager(CARD, lambda _: [TokenDelta((1, 2), "length", 1, 0, (logprob,))])
    with pytest.raises(EspalierError, match="log-probabilities"):
        await drained(choice_deltas(manager, generation(), ChoiceText(CODEC)))


async def drained(choices: AsyncGenerator[object]) -> None:
    """Read to the end."""
    async for _ in choices:
        pass


def choices_of(manager: ScriptedManager, count: int) -> list[AsyncGenerator[ChoiceDelta]]:
    """`count` choices named by their index."""
    return [choice_deltas(manager, generation(str(idx)), ChoiceText(CODEC)) for idx in range(count)]


async def test_one_failing_choice_cancels_the_others() -> None:
    """The error comes out as it is, and nothing goes on."""
    manager = ScriptedManager(CARD, lambda asked: [Overloaded("full", 3)] if asked.request_id == "1" else [HANG])
    with pytest.raises(Overloaded):
        await drained(side_by_side(choices_of(manager, 3)))
    assert manager.num_open == 0
    assert len(manager.ended) == len(manager.asked)


async def test_closing_cancels_all_choices() -> None:
    """When `aclose` returns every generation is closed."""
    manager = ScriptedManager(CARD, lambda _: [TokenDelta((1,), None, 1), HANG])
    together = side_by_side(choices_of(manager, 4))
    await anext(together)
    await together.aclose()
    assert manager.num_open == 0
    assert sorted(manager.ended) == [(str(idx), True) for idx in range(4)]


async def test_choices_run_side_by_side() -> None:
    """Each choice waits for all others to have begun: only concurrent choices end."""
    begun = asyncio.Barrier(3)

    async def choice() -> AsyncGenerator[ChoiceDelta]:
        await begun.wait()
        yield ChoiceDelta("", (1,), "length", 1)

    told = [idx async for idx, _ in side_by_side([choice() for _ in range(3)])]
    assert sorted(told) == [0, 1, 2]


def test_deltas_of_a_script() -> None:
    """Every cut of the fake's helper keeps all tokens, in order, with one finish reason."""
    for cuts in itertools.product(range(4), repeat=2):
        told = deltas([1, 2, 3], cuts, "stop")
        assert [token for delta in told for token in delta.tokens] == [1, 2, 3]
        assert [delta.finish_reason for delta in told if delta.finish_reason] == ["stop"]
