"""Which block holds which text: full blocks of committed tokens, found by the block before them and their own tokens.

Knows numbers of blocks and tokens: no torch, no requests. The key holds the tokens themselves, so that no collision of
hashes can ever serve another text's K and V.
"""

from collections import Counter

Tokens = tuple[int, ...]
_Key = tuple[int | None, Tokens]


class PrefixIndex:
    """A trie of blocks; a block's key is its predecessor (None: the text begins here) and its tokens.

    Invariant: the predecessor of a known block is known. So a known block's number stands for one text from its start.
    """

    def __init__(self) -> None:
        self._blocks: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}
        self._num_successors: Counter[int | None] = Counter()

    def __contains__(self, block: int) -> bool:
        """Whether the block can be found."""
        return block in self._keys

    def find(self, previous: int | None, tokens: Tokens) -> int | None:
        """The block that holds `tokens` behind the text that ends with block `previous`."""
        return self._blocks.get((previous, tokens))

    def add(self, previous: int | None, tokens: Tokens, block: int) -> None:
        """Makes a block known whose text is not yet known."""
        key = previous, tokens
        assert previous is None or previous in self._keys, "behind a text that is not known"
        assert key not in self._blocks, "a text has one block"
        assert block not in self._keys, "a block has one text"
        self._blocks[key] = block
        self._keys[block] = key
        self._num_successors[previous] += 1

    def forget(self, block: int) -> None:
        """Makes a block unknown, so that it can hold something else; its successors must be unknown already."""
        assert not self._num_successors[block], "its number would come to stand for another text"
        key = self._keys.pop(block)
        del self._blocks[key], self._num_successors[block]
        self._num_successors[key[0]] -= 1
