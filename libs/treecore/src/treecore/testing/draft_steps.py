"""One request's drafts as its tests ask for them: items, steps whose books must balance, and what came back."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from treecore.expand import Expansion
from treecore.messages import DraftItem, DraftReply, DraftRequest, RequestId, join_tree
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.tree import TokenTree

GREEDY = SamplingParams(0.0, 0, 1.0, Seed(0))


def draft_item(committed: Sequence[int], widths: Sequence[int] = (), start: int = 0, **more: object) -> DraftItem:
    """Request r, greedy: committed tokens from `start` on, and a tree behind them. more: other fields of DraftItem."""
    sent = np.array(committed[start:], np.int32)
    made = DraftItem(RequestId("r"), 0, start, sent, None if start else GREEDY, Expansion(tuple(widths)))
    return replace(made, **more)  # type: ignore[arg-type]


def draft_step(
    step: Callable[[DraftRequest], DraftReply], *items: DraftItem, session: str = "me", released: tuple[str, ...] = ()
) -> DraftReply:
    """One step; the integrity equation must hold behind it, and each item have one answer."""
    reply = step(DraftRequest(session, 0, tuple(map(RequestId, released)), items))
    assert reply.blocks.room + reply.blocks.used == reply.blocks.total
    answered = [entry.request_id for entry in reply.items] + [entry.request_id for entry in reply.refused]
    assert sorted(answered) == sorted(entry.request_id for entry in items)
    return reply


def drafted(reply: DraftReply, root: int, request_id: str = "r") -> TokenTree:
    """The tree of one item; must be one."""
    (found,) = [entry for entry in reply.items if entry.request_id == request_id]
    return join_tree(root, found.tokens, found.parents, 0, found.laws)
