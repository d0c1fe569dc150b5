"""Every family in groups of real processes: the logits of transformers (threads stand in for processes in treecore)."""

from pathlib import Path

import numpy as np
import pytest
import torch

from llm_verifier.group.testing import RunningGroup, running_group
from treecore.model.batch import ForwardBatch
from treecore.model.sequence import SequenceCache
from treecore.testing.families import load_reference, write_family
from treecore.testing.trees import random_parents

FAMILIES = ("llama", "llama_one_kv_head", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "opt")
SHAPES = ((2, 1), (1, 2), (2, 2))


class Request:
    """One request of a group over a cache that is NaN where nothing was written."""

    def __init__(self, group: RunningGroup) -> None:
        self._decoder = group.decoder
        self._pool = group.decoder.new_pool(256)
        self._pool.own.kv.fill_(float("nan"))
        self._cache = SequenceCache(self._pool, block_len=4)

    def step(self, start: int, tokens: list[int], tree: list[int], parents: list[int]) -> torch.Tensor:
        """Logits of the root and every node, in chunks of at most 12 rows."""
        self._cache.advance("r", start, tokens)
        self._cache.extend("r", tree, parents)
        logits = []
        while self._cache.num_pending("r"):
            segment = self._cache.next_segment("r", 12)
            logits.append(self._decoder.forward(ForwardBatch.from_segments([segment]), self._pool))
            self._cache.mark_written("r", segment.num_rows)
        return torch.cat(logits)


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_equals_transformers(tmp_path: Path, family: str, sizes: tuple[int, int]) -> None:
    """Behind a prompt, incrementally behind an accepted path, and at each node of trees (Definition 4.1): 1e-4."""
    path = write_family(tmp_path / family, family)
    rng = np.random.default_rng(3)
    prompt, tree = rng.integers(3, 61, 21).tolist(), rng.integers(3, 61, 9).tolist()
    parents = list(random_parents(rng, 10)[1:])
    paths: list[list[int]] = [[]]
    for token, parent in zip(tree, parents, strict=True):
        paths.append([*paths[parent], token])
    accepted = [*max(paths, key=len), 7]
    model = load_reference(path)

    def wanted(texts: list[list[int]]) -> torch.Tensor:
        with torch.inference_mode():
            return torch.stack([model(torch.tensor([text])).logits[0, -1] for text in texts])

    with running_group(path, *sizes) as group:
        request = Request(group)
        found = request.step(0, prompt, tree, parents)
        torch.testing.assert_close(found, wanted([prompt + below for below in paths]), atol=1e-4, rtol=0)
        found = request.step(len(prompt), accepted, [], [])
        torch.testing.assert_close(found, wanted([prompt + accepted]), atol=1e-4, rtol=0)
