"""Hand-made records of a run: for tests."""

from espalier_local.bench.speculate.configurations import AHEAD, BOOSTED, DYNAMIC, Cast, Shapes, configurations
from espalier_local.bench.speculate.records import Decoded, Round, Run, Setup
from espalier_local.bench.speculate.totals import StepTotals, totals

SHAPES = Shapes(depth=2, wide_level=1, widths=(2, 3), others=((2,),))
EVERYTHING = configurations(Cast("ssm", ("i1", "i2"), ("b1", "b2"), "suffix"), SHAPES)
SETUP = Setup("llm", ("ssm", "b1", "b2"), "float32", 1, "1 core of wood", 64, 1, EVERYTHING, ("x: no SSM x runs",))


PAGE = """# HELP espalier_steps_total LLM steps
espalier_steps_total 10.0
espalier_draft_tokens_total 40.0
espalier_step_part_seconds_sum{part="wait"} 0.01
espalier_step_part_seconds_sum{part="draft_forward"} 0.02
espalier_step_part_seconds_sum{part="draft_sample"} 0.005
espalier_step_part_seconds_sum{part="draft_wire"} 0.005
espalier_step_part_seconds_sum{part="merge"} 0.01
espalier_step_part_seconds_sum{part="verify_forward"} 0.15
espalier_step_part_seconds_sum{part="verify_sample"} 0.03
espalier_step_part_seconds_sum{part="verify_wire"} 0.02
espalier_step_part_seconds_sum{part="accept"} 0.03
espalier_trees_total{drafted="ahead"} 6.0
espalier_trees_total{drafted="in_step"} 2.0
espalier_ssm_draft_tokens_total{ssm="b1"} 30.0
espalier_ssm_accepted_tokens_total{ssm="b1"} 12.0
espalier_ssm_draft_tokens_total{ssm="ssm"} 10.0
"""


def run_of(*answers: tuple[int, int, float], totals: StepTotals | None = None, checksum: int = 7) -> Run:
    """A run whose answers are (tokens, steps, ms per token)."""
    decoded = tuple(Decoded(tokens, steps, ms, checksum) for tokens, steps, ms in answers)
    return Run(decoded, totals or StepTotals())


def round_of(prompt_id: str, category: str = "qa", temperature: float = 0.0, **runs: Run) -> Round:
    """A round of one prompt."""
    return Round(temperature, (prompt_id,), (category,), runs)


def recorded() -> list[Round]:
    """Two categories, two temperatures, batches of one and two; the wider, the more tokens a step and ms a token."""
    speeds = {"incremental": (1, 40.0), "sequence <1,1>": (2, 30.0), "tree <2,1>": (3, 25.0), "tree <3,1>": (4, 45.0),
              "tree <2>": (2, 36.0), BOOSTED: (3, 28.0), DYNAMIC: (3, 20.0), AHEAD: (3, 16.0)}  # fmt: skip

    def runs(batch: int) -> dict[str, Run]:
        steps = totals(PAGE)
        return {
            name: run_of(*[(25, 1 + 24 // per_step, ms * batch) for _ in range(batch)], totals=steps)
            for name, (per_step, ms) in speeds.items()
            if batch == 1 or name != BOOSTED
        }

    prompts = (("p0", "qa"), ("p1", "qa"), ("p2", "rag"), ("p3", "rag"))
    alone = [Round(heat, (name,), (kind,), runs(1)) for heat in (0.0, 0.8) for name, kind in prompts]
    return [*alone, Round(0.0, ("p0", "p2"), ("qa", "rag"), runs(2))]
