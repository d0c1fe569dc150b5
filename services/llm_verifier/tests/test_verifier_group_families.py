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

SHAPES = {"llama": (1, 2), "qwen2": (2, 1), "llama_one_kv_head": (2, 2)}
IN_2X2 = ("mistral", "qwen3", "gemma2", "gemma3", "opt")


def computed(group: RunningGroup, prompt: list[int], tokens: list[int], parents: list[int]) -> torch.Tensor:
    """Logits of the root and every node: the prompt in two chunks, then the tree in one pass over the cached prompt."""
    pool = group.decoder.new_pool(256)
    pool.own.kv.fill_(float("nan"))
    cache = SequenceCache(pool, block_len=4)
    cache.advance("r", 0, prompt)
    cache.extend("r", tokens, parents)
    logits = []
    while cache.num_pending("r"):
        segment = cache.next_segment("r", 12)
        logits.append(group.decoder.forward(ForwardBatch.from_segments([segment]), pool))
        cache.mark_written("r", segment.num_rows)
    return torch.cat(logits)


@pytest.mark.parametrize("case", [*SHAPES, *IN_2X2])
def test_prompt_and_tree_equal_transformers(tmp_path: Path, case: str) -> None:
    """Each node's logits are those of a plain forward over its path (Definition 4.1), max abs diff 1e-4."""
    path = write_family(tmp_path / case, case)
    rng = np.random.default_rng(3)
    prompt, tokens = rng.integers(3, 61, 21).tolist(), rng.integers(3, 61, 9).tolist()
    parents = list(random_parents(rng, 10)[1:])
    paths: list[list[int]] = [[]]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*paths[parent], token])
    model = load_reference(path)
    with torch.inference_mode():
        wanted = torch.stack([model(torch.tensor([prompt + below])).logits[0, -1] for below in paths])
    with running_group(path, *SHAPES.get(case, (2, 2))) as group:
        torch.testing.assert_close(computed(group, prompt, tokens, parents), wanted, atol=1e-4, rtol=0)
