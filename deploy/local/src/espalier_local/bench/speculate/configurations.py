"""The ways of decoding that are compared: which SSMs draft, and trees of what shape (SpecInfer, Tables 1 and 2).

Knows names and shapes; must not know prompts, measurements or who runs the system.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from espalier_local.bench.contest import angle
from espalier_local.client import Ask, Tree


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way of decoding. ssms: who drafts, by name; empty: incremental. at_every_batch: not at batch 1 only."""

    name: str
    ssms: tuple[str, ...] = ()
    tree: Tree | None = None
    draft_ahead: bool = False
    at_every_batch: bool = True

    @property
    def is_static(self) -> bool:
        """Whether one SSM drafts trees of one shape."""
        return isinstance(self.tree, tuple) and len(self.ssms) == 1

    def ask(self, ask: Ask) -> Ask:
        """The same, asked in this way."""
        return replace(
            ask, speculation=bool(self.ssms), tree=self.tree, draft_ahead=self.draft_ahead, ssms=self.ssms or None
        )


@dataclass(frozen=True, slots=True)
class Cast:
    """Which SSM plays which part. one: where a single SSM drafts. Empty parts have no SSM."""

    one: str = ""
    independent: tuple[str, ...] = ()
    boosted: tuple[str, ...] = ()
    suffix: str = ""

    @property
    def merged(self) -> tuple[str, ...]:
        """The SSMs with weights that draft together where a suffix SSM joins them."""
        return self.boosted or self.independent or (self.one,)


@dataclass(frozen=True, slots=True)
class Shapes:
    """Static trees <1,..,k,..,1>: `depth` levels, of which the `wide_level`-th has k children; others as they are."""

    depth: int
    wide_level: int
    widths: tuple[int, ...]
    others: tuple[tuple[int, ...], ...] = ()

    @property
    def sequence(self) -> tuple[int, ...]:
        """<1,1,..>."""
        return (1,) * self.depth

    @property
    def trees(self) -> tuple[tuple[int, ...], ...]:
        """All but the sequence, each once."""
        wide = [self._wide(width) for width in self.widths]
        return tuple(dict.fromkeys(tree for tree in (*wide, *self.others) if tree != self.sequence))

    def _wide(self, width: int) -> tuple[int, ...]:
        return tuple(width if level == self.wide_level else 1 for level in range(1, self.depth + 1))


INCREMENTAL = Configuration("incremental")
DYNAMIC = "dynamic"
AHEAD = "dynamic + ahead"
BOOSTED = "merged boosted"
SEQUENCE = "sequence"


def configurations(cast: Cast, shapes: Shapes) -> tuple[Configuration, ...]:
    """All of them. Merged SSMs draft a sequence each: as many nodes as one SSM's <m,1,..>."""
    one, sequence = (cast.one,), shapes.sequence
    static = [Configuration(f"{_kind(tree)} {angle(tree)}", one, tree) for tree in (sequence, *shapes.trees)]
    return (
        INCREMENTAL,
        *static,
        Configuration("merged independent", cast.independent, sequence, at_every_batch=False),
        Configuration(BOOSTED, cast.boosted, sequence, at_every_batch=False),
        Configuration("merged + suffix", (*cast.merged, cast.suffix), sequence, at_every_batch=False),
        Configuration(DYNAMIC, one, "dynamic"),
        Configuration(AHEAD, one, "dynamic", draft_ahead=True),
        Configuration("dynamic + ahead + merged + suffix", (*cast.merged, cast.suffix), "dynamic", draft_ahead=True),
    )


def possible(
    wanted: Sequence[Configuration], running: Collection[str]
) -> tuple[tuple[Configuration, ...], tuple[str, ...]]:
    """Those that can be measured with the SSMs that run, and for each of the others why it cannot."""
    faults = {each.name: _fault(each, running) for each in wanted}
    kept = tuple(each for each in wanted if not faults[each.name])
    return kept, tuple(f"{name}: {fault}" for name, fault in faults.items() if fault)


def _fault(configuration: Configuration, running: Collection[str]) -> str:
    missing = [name for name in configuration.ssms if name and name not in running]
    if missing:
        return f"no SSM {', '.join(missing)} runs"
    is_cast = configuration == INCREMENTAL or (configuration.ssms and all(configuration.ssms))
    return "" if is_cast else "no SSM plays this part"


def _kind(tree: tuple[int, ...]) -> str:
    return SEQUENCE if max(tree) == 1 else "tree"
