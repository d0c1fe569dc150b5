"""What a matrix is made of: rows and columns of stored ones, read now or at each use. Knows names, not meanings."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treecore.model.checkpoint import Checkpoint
from treecore.model.rope import interleave_pairs


@dataclass(frozen=True, slots=True)
class Piece:
    """Those rows and columns of a stored matrix; where pair_dim is given, pairs of heads of that size side by side."""

    name: str
    rows: range
    columns: range
    pair_dim: int | None = None

    def read(self, checkpoint: Checkpoint) -> Tensor:
        """[rows, columns] in the stored dtype."""
        stored = checkpoint.part(self.name, self.rows, self.columns)
        return stored if self.pair_dim is None else interleave_pairs(stored, self.pair_dim)


Pieces = Sequence[Piece]


def whole_shape(pieces: Pieces) -> torch.Size:
    """The shape of the matrix that the pieces are, one below the other."""
    return torch.Size((sum(len(piece.rows) for piece in pieces), len(pieces[0].columns)))


def read_whole(pieces: Pieces, checkpoint: Checkpoint) -> Tensor:
    """The matrix, in the stored dtype."""
    return torch.cat([piece.read(checkpoint) for piece in pieces])
