"""The LLM's answer behind every node of a tree, by rule (architecture section 5). Pure: logits in, wire values out."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treecore.law import Distribution, Paths, adjusted, logprobs, processed, top_indices
from treecore.messages import Logprobs, Tokens
from treecore.multi_step import masses_at, outside_draw
from treecore.params import SamplingParams
from treecore.sampling import best_tokens_of_nodes
from treecore.sparse import Masses, Supports

Rows = NDArray[np.float32]
Tables = list[NDArray[np.float64]] | None
"""Behind each node the log-probs of all tokens, if they were asked for."""


@dataclass(frozen=True, slots=True)
class Answer:
    """See messages.VerifiedItem."""

    tokens: Tokens
    masses: Masses | None
    logprobs: Logprobs | None


def answer_nodes(
    logits: NDArray[np.float32], params: SamplingParams, paths: Paths, supports: Supports | None = None
) -> Answer:
    """The answer behind n nodes. logits: the LLM's, fp32 [n, V].

    Where no support is given, x_t: the token that incremental decoding would choose there; -1 behind a closed node.
    supports: well-formed.
    """
    rows = adjusted(logits, None, params, paths)
    tables = None if params.num_logprobs is None else [logprobs(row) for row in rows]
    if supports is None:
        tokens = np.concatenate(best_tokens_of_nodes(rows, None, params, paths.positions))
        tokens[paths.is_closed] = -1
        return Answer(tokens, None, _logprobs(tables, tokens, params.num_logprobs or 0))
    laws = {node: processed(rows[node], None, params) for node in supports.nodes.tolist()}
    tokens = _tokens(rows, laws, params, paths, supports)
    tokens[paths.is_closed] = -1
    told = _logprobs(tables, tokens, params.num_logprobs or 0)
    return Answer(tokens, _masses(tables, laws, supports, paths.is_closed), told)


def _tokens(
    rows: Rows, laws: dict[int, Distribution], params: SamplingParams, paths: Paths, supports: Supports
) -> Tokens:
    """Drawn outside the support where there is one, x_t elsewhere."""
    tokens, positions = np.empty(len(rows), np.int32), paths.positions
    plain = [node for node in range(len(rows)) if node not in laws]
    if plain:
        chosen = best_tokens_of_nodes(rows[plain], None, params, [positions[node] for node in plain])
        tokens[plain] = np.concatenate(chosen)
    for node, span in supports.spans().items():
        tokens[node] = outside_draw(laws[node], supports.token_ids[span], params, positions[node])
    return tokens


def _masses(tables: Tables, laws: dict[int, Distribution], supports: Supports, is_closed: NDArray[np.bool_]) -> Masses:
    """Of p at the supports; 0 behind a closed node."""
    parts = [(node, supports.token_ids[span]) for node, span in supports.spans().items()]
    p = np.concatenate([masses_at(laws[node], ids) * ~is_closed[node] for node, ids in parts])
    if tables is None:
        return Masses(p, np.empty(0, np.float32))
    return Masses(p, np.concatenate([tables[node][ids] for node, ids in parts]).astype(np.float32))


def _logprobs(tables: Tables, tokens: Tokens, count: int) -> Logprobs | None:
    """Of the tokens (-inf for one of -1) and of the best `count` behind each node."""
    if tables is None:
        return None
    best = [top_indices(table, count) if count else np.empty(0, np.intp) for table in tables]
    chosen = [table[token] if token >= 0 else -np.inf for table, token in zip(tables, tokens.tolist(), strict=True)]
    return Logprobs(
        np.array(chosen, np.float32),
        np.concatenate(best).astype(np.int32),
        np.concatenate([table[ids] for table, ids in zip(tables, best, strict=True)]).astype(np.float32),
    )
