"""The decoder against transformers: prefill, chunks, steps, trees, batches, over a cache that is full of NaN."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from treecore.model import linear, load
from treecore.model.batch import ForwardBatch
from treecore.model.decoder import Decoder
from treecore.model.linear import DType, Precision
from treecore.model.load import load_decoder
from treecore.model.norm import RmsNorm
from treecore.testing.checkpoints import write_tiny_draft, write_tiny_llama
from treecore.testing.runner import Runner

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa_tied": {},
    "mha_untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "mqa_wide_heads": {"num_key_value_heads": 1, "head_dim": 16},
    "rope_linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "rope_llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


def runner_of(decoder: Decoder) -> Runner:
    """Over a cache full of NaN: whatever reads a slot that was not written shows."""
    pool = decoder.new_pool(1024)
    pool.kv.fill_(float("nan"))
    return Runner(lambda batch: decoder.forward(batch, pool), pool)


def reference(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Logits of transformers at every position, by one plain causal forward."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def last_logits(model: LlamaForCausalLM, texts: list[list[int]]) -> torch.Tensor:
    """Logits behind the last token of each text: plain causal forwards, padded on the right (which none sees)."""
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    with torch.inference_mode():
        logits = model(padded).logits.float()
    return torch.stack([row[len(text) - 1] for row, text in zip(logits, texts, strict=True)])


def load_reference(path: Path) -> LlamaForCausalLM:
    """The same checkpoint in transformers, fp32."""
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, LlamaForCausalLM]:
    """Each variant, loaded by us and by transformers."""
    path = write_tiny_llama(tmp_path_factory.mktemp(request.param), **VARIANTS[request.param])
    return load_decoder(path, dtype="float32"), load_reference(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, LlamaForCausalLM]:
    """The first variant, in fp16 on disk: linears are FBGEMM's where there is one."""
    path = write_tiny_llama(tmp_path_factory.mktemp("plain"), dtype=torch.float16)
    return load_decoder(path, dtype="float32"), load_reference(path)


def random_tokens(seed: int, length: int) -> list[int]:
    """Tokens of the tiny vocabulary."""
    return np.random.default_rng(seed).integers(0, 61, length).tolist()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Every entry within `tolerance`."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def test_prefill_equals_transformers_at_every_position(pair: tuple[Decoder, LlamaForCausalLM]) -> None:
    """One segment with every row's logits."""
    decoder, model = pair
    runner, tokens = runner_of(decoder), random_tokens(0, 100)
    runner.cache.advance("a", 0, tokens)
    segment = replace(runner.cache.next_segment("a"), logit_rows=np.arange(len(tokens)))
    assert_close(runner.forward(segment)[0], reference(model, tokens))


def test_chunks_and_single_steps_equal_one_prefill(pair: tuple[Decoder, LlamaForCausalLM]) -> None:
    """Prefill in chunks of 7, then five tokens one by one, with a block boundary in between."""
    decoder, model = pair
    runner, tokens = runner_of(decoder), random_tokens(1, 40)
    runner.cache.advance("a", 0, tokens[:35])
    logits = [runner.pending("a", max_rows=7)]
    for length in range(35, 40):
        assert runner.cache.advance("a", length, [tokens[length]]) == length
        logits.append(runner.pending("a"))
    assert_close(torch.cat(logits), reference(model, tokens)[34:])


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens and parents of a random tree, siblings distinct."""
    nodes: dict[tuple[int, int], None] = {}
    for _ in range(draw(st.integers(1, 12))):
        nodes[draw(st.integers(0, len(nodes))), draw(st.integers(0, 60))] = None
    parents, tokens = zip(*nodes, strict=True)
    return list(tokens), list(parents)


def path_tokens(tokens: list[int], parents: list[int], node: int) -> list[int]:
    """The tokens from the root's child down to `node`."""
    path: list[int] = []
    while node:
        path.insert(0, tokens[node - 1])
        node = parents[node - 1]
    return path


@settings(max_examples=30, deadline=None)
@given(tree=trees(), prompt_len=st.integers(1, 20), cached=st.booleans(), max_rows=st.sampled_from([None, 3]))
def test_every_tree_node_equals_a_plain_forward_over_its_path(
    plain: tuple[Decoder, LlamaForCausalLM],
    tree: tuple[list[int], list[int]],
    prompt_len: int,
    cached: bool,
    max_rows: int | None,
) -> None:
    """With the prompt cached or in the same pass, and with passes cut anywhere (as in level-by-level growth)."""
    decoder, model = plain
    tokens, parents = tree
    runner, prompt = runner_of(decoder), random_tokens(prompt_len, prompt_len)
    runner.cache.advance("a", 0, prompt)
    if cached:
        runner.pending("a")
        runner.cache.advance("a", 0, prompt)
    runner.cache.extend("a", tokens, parents)
    logits = runner.pending("a", max_rows)
    paths = [path_tokens(tokens, parents, node) for node in range(len(tokens) + 1)]
    assert_close(logits, last_logits(model, [prompt + path for path in paths]))


@settings(max_examples=20, deadline=None)
@given(tree=trees(), seed=st.integers(0, 99))
def test_after_an_accepted_path_generation_goes_on_as_if_there_had_been_no_tree(
    plain: tuple[Decoder, LlamaForCausalLM], tree: tuple[list[int], list[int]], seed: int
) -> None:
    """The accepted rows are kept (only root and bonus are computed), the others leave no trace."""
    decoder, model = plain
    tokens, parents = tree
    runner, prompt = runner_of(decoder), random_tokens(seed, 9)
    runner.cache.advance("a", 0, prompt)
    runner.cache.extend("a", tokens, parents)
    runner.pending("a")
    accepted = path_tokens(tokens, parents, 1 + seed % len(tokens))
    committed = [*accepted, 60 - seed % 2]
    cached_len = runner.cache.advance("a", len(prompt), committed)
    assert cached_len >= len(prompt) + len(accepted)
    assert_close(runner.pending("a"), reference(model, prompt + committed)[-1:])


def test_requests_in_one_batch_do_not_see_each_other(plain: tuple[Decoder, LlamaForCausalLM]) -> None:
    """Prompts long and short, each with a tree, in one forward: solo logits come out, in order."""
    decoder, model = plain
    runner = runner_of(decoder)
    prompts = {f"r{length}": random_tokens(length, length) for length in [1, 2, 3, 5, 8, 9, 17, 31, 32, 33, 34, 64, 70]}
    for request_id, prompt in prompts.items():
        runner.cache.advance(request_id, 0, prompt)
        runner.cache.extend(request_id, [7, 8, 9], [0, 0, 2])
    segments = [runner.cache.next_segment(request_id) for request_id in prompts]
    logits = runner.forward(*segments)
    for prompt, own in zip(prompts.values(), logits, strict=True):
        assert_close(own, last_logits(model, [prompt + path for path in ([], [7], [8], [8, 9])]))


def test_equal_steps_of_a_batch_need_no_padding_and_are_right(plain: tuple[Decoder, LlamaForCausalLM]) -> None:
    """Incremental decoding of four requests with contexts of 16..19: one attention call, differently long."""
    decoder, model = plain
    runner = runner_of(decoder)
    prompts = {f"r{length}": random_tokens(length, length) for length in range(16, 20)}
    for request_id, prompt in prompts.items():
        runner.cache.advance(request_id, 0, prompt)
        runner.pending(request_id)
        runner.cache.advance(request_id, 0, prompt)
    segments = [runner.cache.next_segment(request_id) for request_id in prompts]
    batch = ForwardBatch.from_segments(segments)
    assert len(batch.groups) == 1
    assert batch.groups[0].padded_rows is None
    assert_close(torch.cat(runner.forward(*segments)), last_logits(model, list(prompts.values())))


def test_a_forward_may_want_no_logits(plain: tuple[Decoder, LlamaForCausalLM]) -> None:
    """A prefill chunk before the last: no rows, full width."""
    runner = runner_of(plain[0])
    runner.cache.advance("a", 0, random_tokens(0, 20))
    (logits,) = runner.forward(runner.cache.next_segment("a", 8))
    assert logits.shape == (0, 61)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_rounds_the_weights(tmp_path: Path, dtype: DType) -> None:
    """On a CPU without kernels for it the arithmetic stays fp32, on rounded weights; else it is near that."""
    path = write_tiny_llama(tmp_path)
    decoder, model = load_decoder(path, dtype=dtype), load_reference(path)
    for weight in model.parameters():
        weight.data = weight.data.to(getattr(torch, dtype)).float()
    runner, tokens = runner_of(decoder), random_tokens(3, 30)
    runner.cache.advance("a", 0, tokens)
    tolerance = 1e-4 if decoder.activation_dtype is torch.float32 else 0.3
    assert_close(runner.pending("a"), reference(model, tokens)[-1:], tolerance)


def test_bfloat16_activations_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CPU with bf16 kernels runs, but with torch's own linears: near fp32, and a cache of half the size."""
    bfloat16 = Precision(torch.bfloat16, torch.bfloat16, torch.device("cpu"))
    monkeypatch.setattr(load, "choose_precision", lambda *_args, **_options: bfloat16)
    monkeypatch.setattr(linear, "pack_onednn", linear.PlainLinear)
    path = write_tiny_llama(tmp_path)
    decoder, tokens = load_decoder(path, dtype="bfloat16"), random_tokens(3, 30)
    assert decoder.new_pool(1).kv.dtype is torch.bfloat16
    runner = runner_of(decoder)
    runner.cache.advance("a", 0, tokens)
    runner.cache.extend("a", [7, 8, 9], [0, 0, 2])
    texts = [tokens + path for path in ([], [7], [8], [8, 9])]
    assert_close(runner.pending("a"), last_logits(load_reference(path), texts), 0.3)


@pytest.mark.parametrize("num_rows", [1, 2, 33])
def test_the_norm_is_that_of_torch(num_rows: int) -> None:
    """Within fp32 rounding; zeros stay zeros; rows do not depend on each other."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(40, 32, generator=generator), torch.randn(32, generator=generator)
    x[0] = 0
    norm = RmsNorm.of(weight, 1e-5)
    assert_close(norm(x[:num_rows]), torch.nn.functional.rms_norm(x[:num_rows], (32,), weight, 1e-5), 1e-5)
    assert torch.equal(norm(x)[:num_rows], norm(x[:num_rows]))


def test_a_draft_takes_embedding_and_head_rows_from_its_teacher(tmp_path: Path) -> None:
    """Column i of the logits is token head_token_ids[i]; the layers are the draft's, all else is the teacher's."""
    teacher = write_tiny_llama(tmp_path / "teacher", tie_word_embeddings=False)
    ids = [3, 60, 5, 17]
    draft = write_tiny_draft(tmp_path / "draft", token_ids=ids, num_hidden_layers=1, tie_word_embeddings=False)
    decoder = load_decoder(draft, dtype="float32", embedding_from=teacher)
    model = load_reference(write_tiny_llama(tmp_path / "whole", seed=1, num_hidden_layers=1, tie_word_embeddings=False))
    taught = load_reference(teacher)
    model.model.embed_tokens, model.lm_head = taught.model.embed_tokens, taught.lm_head
    model.load_state_dict(
        {name: t for name, t in load_file(draft / "model.safetensors").items() if name[0] == "m"}, strict=False
    )
    assert decoder.output_token_ids is not None
    assert decoder.output_token_ids.dtype == np.int32
    assert decoder.output_token_ids.tolist() == ids
    runner, tokens = runner_of(decoder), random_tokens(4, 12)
    runner.cache.advance("a", 0, tokens)
    assert_close(runner.pending("a"), reference(model, tokens)[-1:, ids])
