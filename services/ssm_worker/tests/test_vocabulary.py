"""SSMs of another vocabulary: what maps to what, who is refused, and that drafts are those of the same model."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssm_worker.grow import Grower
from ssm_worker.translated import TranslatedDecoder
from ssm_worker.vocabulary import Model, map_pieces, token_map
from treecore.errors import ConfigError
from treecore.expand import Expansion
from treecore.messages import DraftItem, DraftRequest, RequestId, WorkerId, join_tree
from treecore.model.decoder import Decoder
from treecore.model.families import read_spec
from treecore.model.held import HeldRequests
from treecore.model.load import load_decoder
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.testing.checkpoints import TINY, random_tensors, write_checkpoint, write_tiny_draft
from treecore.testing.tokenizers import save_byte_fallback, save_byte_level
from treecore.tree import TokenTree

WORDS = [b" the", b" dog", b" ran", b"ning"]
NUM_SPECIAL = 4
VOCAB_SIZE = NUM_SPECIAL + 256 + len(WORDS)
BYTE_FF = NUM_SPECIAL + 255  # in no UTF-8 text; the tokenizer library gives it none
TEXTS = [token for token in range(NUM_SPECIAL, VOCAB_SIZE) if token != BYTE_FF]
SIZES = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2}


def write_model(directory: Path, order: Sequence[int], words: Sequence[bytes] = WORDS, **sizes: Any) -> Path:
    """One and the same model and tokenizer, with its token i as token order[i]."""
    config = {**TINY, **SIZES, **sizes}
    tensors = random_tensors(config, seed=5)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = embedding[np.argsort(order)]
    write_checkpoint(directory, config, tensors)
    save_byte_level(directory, words)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {piece: int(order[token]) for piece, token in vocab.items()}
    for added in tokenizer["added_tokens"]:
        added["id"] = int(order[added["id"]])
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return directory


def shuffled(seed: int) -> list[int]:
    """Another order of the tokens, special ones too."""
    order: list[int] = np.random.default_rng(seed).permutation(VOCAB_SIZE).tolist()
    return order


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The LLM."""
    path = write_model(tmp_path_factory.mktemp("vocabulary") / "llm", range(VOCAB_SIZE))
    return Model(path, read_spec(path))


def ssm_at(path: Path) -> Model:
    """A checkpoint as an SSM."""
    return Model(path, read_spec(path))


pieces = st.lists(
    st.tuples(st.booleans(), st.text("abc", max_size=4).map(str.encode)), min_size=1, max_size=30, unique=True
)


@given(ssm=pieces, llm=pieces, padding=st.integers(0, 3))
def test_twins_have_equal_text_and_others_end_alike(
    ssm: list[tuple[bool, bytes]], llm: list[tuple[bool, bytes]], padding: int
) -> None:
    """All twins that there are, ascending; every token reads as the longest end that the SSM knows."""
    found = map_pieces(ssm, llm, len(llm) + padding, 0)
    wanted = [(llm.index(piece), ssm.index(piece)) for piece in llm if piece in ssm and piece[1] and not piece[0]]
    assert list(zip(found.llm_twins.tolist(), found.ssm_twins.tolist(), strict=True)) == sorted(wanted)
    for token, (is_special, text) in enumerate(llm):
        read = ssm[found.reads[token]]
        ends = [text[start:] for start in range(len(text))] if not is_special else [text]
        known = [end for end in ends if (is_special, end) in ssm]
        assert read == ((is_special, known[0]) if known else ssm[0])
    assert (found.reads[len(llm) :] == 0).all()


def test_of_two_tokens_of_one_text_the_later_is_the_word() -> None:
    """SentencePiece has each byte twice: as a byte, and as the word that models use."""
    found = map_pieces([(False, b"x"), (False, b"a"), (False, b"a")], [(False, b"a"), (False, b"a")], 2, 0)
    assert (found.llm_twins.tolist(), found.ssm_twins.tolist(), found.reads.tolist()) == ([1], [2], [2, 2])


def test_the_same_tokenizer_needs_no_map(llm: Model, tmp_path: Path) -> None:
    """Byte by byte, or spelled in another way."""
    same = write_model(tmp_path / "same", range(VOCAB_SIZE))
    assert token_map(ssm_at(same), llm, 0.5) is None
    path = same / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")), indent=2), encoding="utf-8")
    assert token_map(ssm_at(same), llm, 0.5) is None


def test_another_vocabulary_of_the_same_size_is_noticed(llm: Model, tmp_path: Path) -> None:
    """It would have drafted nonsense; now it is mapped."""
    order = shuffled(1)
    found = token_map(ssm_at(write_model(tmp_path / "other", order)), llm, 1.0)
    assert found is not None
    assert [found.reads[token] for token in (*range(NUM_SPECIAL), *TEXTS)] == [
        order[token] for token in (*range(NUM_SPECIAL), *TEXTS)
    ]
    assert found.llm_twins.tolist() == TEXTS


def test_a_padded_head_of_the_same_tokens_is_mapped(llm: Model, tmp_path: Path) -> None:
    """Ids behind the tokenizer's are nobody's."""
    padded = write_model(tmp_path / "padded", range(VOCAB_SIZE + 12), vocab_size=VOCAB_SIZE + 12)
    found = token_map(ssm_at(padded), llm, 1.0)
    assert found is not None
    assert found.ssm_twins.tolist() == TEXTS


def test_texts_are_compared_not_their_spellings(llm: Model, tmp_path: Path) -> None:
    """A SentencePiece tokenizer shares bytes and words with a byte-level one."""
    path = write_model(tmp_path / "sentencepiece", range(VOCAB_SIZE))
    save_byte_fallback(path, [" ran", " cat", "ning", " the"])
    found = token_map(ssm_at(path), llm, 0.9)
    assert found is not None
    words = dict(zip(found.llm_twins.tolist(), found.ssm_twins.tolist(), strict=True))
    first = NUM_SPECIAL + 256
    assert [words.get(first + idx) for idx in range(4)] == [first + 3, None, first, first + 2]
    assert found.reads[first + 1] == words[NUM_SPECIAL + ord("g")]  # " dog" ends like "g"


def test_too_few_shared_tokens_are_refused_naming_both(llm: Model, tmp_path: Path) -> None:
    """With the numbers, and the flag that decides."""
    path = write_model(tmp_path / "few", range(VOCAB_SIZE), [b" un", b" deux", b" trois", b" quatre"])
    assert token_map(ssm_at(path), llm, 0.98) is not None
    with pytest.raises(ConfigError, match=r"few has another .* than .*llm and shares 255 of its 259 tokens .*98%.*99%"):
        token_map(ssm_at(path), llm, 0.99)


def test_without_a_tokenizer_the_size_decides(llm: Model, tmp_path: Path) -> None:
    """A shipped artefact has none; one that borrows the LLM's embedding has the LLM's tokens, whatever lies beside."""
    path = write_model(tmp_path / "bare", range(VOCAB_SIZE))
    (path / "tokenizer.json").unlink()
    assert token_map(ssm_at(path), llm, 0.5) is None
    other = write_model(tmp_path / "size", range(VOCAB_SIZE + 1), vocab_size=VOCAB_SIZE + 1)
    (other / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"size: vocab_size=265, but .*llm has 264"):
        token_map(ssm_at(other), llm, 0.5)
    draft = write_tiny_draft(tmp_path / "draft", token_ids=[5], **SIZES)
    save_byte_level(draft, [b"other"])
    assert token_map(ssm_at(draft), llm, 0.5) is None


def test_what_is_no_tokenizer_is_told_in_one_line(llm: Model, tmp_path: Path) -> None:
    """Naming the file."""
    path = write_model(tmp_path / "broken", range(VOCAB_SIZE))
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read"):
        token_map(ssm_at(path), llm, 0.5)


# What is no text is never proposed by a mapped SSM: the other one is kept from it by a bias.
NO_TEXT = (*range(NUM_SPECIAL), BYTE_FF)
GREEDY = SamplingParams(0.0, 0, 1.0, Seed(3), bias_ids=NO_TEXT, biases=(-1e6,) * len(NO_TEXT))
LAWS = [
    GREEDY,
    replace(GREEDY, temperature=0.8),
    replace(GREEDY, temperature=0.8, repetition_penalty=1.5, frequency_penalty=0.5),
    replace(GREEDY, temperature=0.8, rule="multi_step"),
]


def drafted(forwards: Decoder | TranslatedDecoder, prompt: Sequence[int], params: SamplingParams) -> TokenTree:
    """The tree that a fresh grower drafts."""
    held = HeldRequests(forwards, 64, 8)
    grower = Grower(WorkerId("s"), held, forwards.spec.vocab_size, forwards.output_token_ids)
    item = DraftItem(RequestId("r"), 0, 0, np.array(prompt, np.int32), params, Expansion((3, 2, 2)))
    (entry,) = grower.step(DraftRequest("me", 0, (), (item,))).items
    return join_tree(prompt[-1], entry.tokens, entry.parents, 0, entry.laws)


@pytest.mark.parametrize("params", LAWS, ids=["greedy", "sampled", "penalised", "drawn"])
def test_the_llm_in_another_order_drafts_what_the_llm_would(llm: Model, tmp_path: Path, params: SamplingParams) -> None:
    """The same weights, rows in another order, another tokenizer: the same trees, by every rule, behind a long text."""
    theirs = load_decoder(llm.path, dtype="float32")
    path = write_model(tmp_path / "other", shuffled(2))
    found = token_map(ssm_at(path), llm, 1.0)
    assert found is not None
    ours = TranslatedDecoder(load_decoder(path, dtype="float32"), found, llm.spec)
    assert (ours.spec.vocab_size, ours.spec.eos_token_ids) == (VOCAB_SIZE, (2,))
    prompt = np.random.default_rng(4).choice(TEXTS, 40).tolist()
    mine, wanted = drafted(ours, prompt, params), drafted(theirs, prompt, params)
    assert list(mine.paths()) == list(wanted.paths())
    assert len(mine) == 1 + 3 + 6 + 12


def test_a_trimmed_head_proposes_only_what_it_has(llm: Model, tmp_path: Path) -> None:
    """Its columns are its own tokens; those without a twin are left out, and one without any is refused."""
    order = shuffled(3)
    kept = sorted(order[token] for token in (1, 50, 60, 263))
    draft = write_tiny_draft(tmp_path / "draft", token_ids=kept, **SIZES)
    path = write_model(tmp_path / "other", order)
    found = token_map(ssm_at(path), llm, 1.0)
    assert found is not None
    decoder = load_decoder(draft, dtype="float32", embedding_from=path)
    ours = TranslatedDecoder(decoder, found, llm.spec)
    assert ours.output_token_ids.tolist() == [50, 60, 263]
    assert set(drafted(ours, [7, 8], GREEDY).tokens[1:].tolist()) == {50, 60, 263}
    special = write_tiny_draft(tmp_path / "special", token_ids=sorted(order[:2]), **SIZES)
    with pytest.raises(ConfigError, match="none of the tokens"):
        TranslatedDecoder(load_decoder(special, dtype="float32", embedding_from=path), found, llm.spec)
