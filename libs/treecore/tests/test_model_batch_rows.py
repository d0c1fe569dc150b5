"""A segment's rows computed piece by piece: what pipeline stages do with micro-batches."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treecore.model.batch import ForwardBatch, Segment
from treecore.model.decoder import Decoder
from treecore.model.load import load_decoder
from treecore.model.sequence import SequenceCache
from treecore.testing.checkpoints import write_tiny_llama


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A tiny random Llama."""
    return load_decoder(write_tiny_llama(tmp_path_factory.mktemp("rows") / "tiny", seed=5), dtype="float32")


def compute(decoder: Decoder, segment: Segment, cuts: list[int]) -> torch.Tensor:
    """The segment's logits, its rows cut at `cuts`, over a cache that is NaN where nothing was written."""
    pool = decoder.new_pool(64)
    pool.kv.fill_(float("nan"))
    borders = [0, *cuts, segment.num_rows]
    parts = [segment.rows(first, last) for first, last in pairwise(borders)]
    return torch.cat([decoder.forward(ForwardBatch.from_segments([part]), pool) for part in parts])


@settings(max_examples=30)
@given(st.data())
def test_rows_in_pieces_give_the_logits_of_the_whole(decoder: Decoder, data: st.DataObject) -> None:
    """Prompt and tree in one segment, cut anywhere: the same logits, and no slot is read before it is written."""
    cache = SequenceCache(decoder.new_pool(64), block_len=4)
    num_tokens, num_nodes = data.draw(st.integers(1, 20)), data.draw(st.integers(0, 12))
    tokens = np.random.default_rng(num_tokens).integers(0, decoder.spec.vocab_size, num_tokens + num_nodes).tolist()
    cache.advance("r", 0, tokens[:num_tokens])
    cache.extend("r", tokens[num_tokens:], [data.draw(st.integers(0, node)) for node in range(num_nodes)])
    segment = cache.next_segment("r")
    cuts = sorted(data.draw(st.sets(st.integers(1, max(segment.num_rows - 1, 1)), max_size=3)) - {segment.num_rows})
    torch.testing.assert_close(
        compute(decoder, segment, cuts), compute(decoder, segment, []), atol=1e-5, rtol=1e-5, check_stride=False
    )
