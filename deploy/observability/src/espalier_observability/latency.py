"""The dashboard *Latency*: what clients wait for, and where a step's time goes."""

from espalier_observability.board import Board, Graph, Line, Section, Variable
from espalier_observability.objectives import TTFT_LE, TTFT_OBJECTIVE, TTFT_TARGET_S
from espalier_observability.promql import SCOPE, quantile, rate, ratio, total

_QUANTILES = (0.5, 0.9, 0.99)
_OF_MODEL = '{model=~"$model"}'


def _by_model(metric: str) -> tuple[Line, ...]:
    buckets = f"{metric}_bucket{_OF_MODEL}"
    return tuple(Line(quantile(share, buckets, "model"), f"{{{{model}}}} p{share * 100:g}") for share in _QUANTILES)


def _overall(metric: str) -> tuple[Line, ...]:
    return tuple(Line(quantile(share, f"{metric}_bucket"), f"p{share * 100:g}") for share in _QUANTILES)


_CLIENTS = Section(
    "What clients wait for",
    (
        Graph(
            "Time to first token",
            "From a request's arrival at the gateway to a choice's first token: waiting, the prompt, the first step.",
            "s",
            _by_model("espalier_ttft_seconds"),
        ),
        Graph(
            "Time per output token",
            "Of a choice after its first token, from the exact count of its tokens. Speculation shows here.",
            "s",
            _by_model("espalier_tpot_seconds"),
        ),
        Graph(
            "Queue time",
            "From a request's arrival at the manager to the first step that it takes part in. It grows when there is "
            "more to do than a verifier group can take in.",
            "s",
            _overall("espalier_queue_seconds"),
        ),
        Graph(
            "Whole answers",
            "From arrival to the last token of complete answers. Depends on how much clients ask for.",
            "s",
            _by_model("espalier_e2e_seconds"),
        ),
        Graph(
            f"First tokens within {TTFT_TARGET_S} s",
            f"The objective is {TTFT_OBJECTIVE:.0%} in the long run; the alerts EspalierTtftBudget... watch what is "
            "left of it.",
            "percentunit",
            (
                Line(
                    ratio(
                        f'espalier_ttft_seconds_bucket{{model=~"$model", {TTFT_LE}}}',
                        f"espalier_ttft_seconds_count{_OF_MODEL}",
                        "model",
                    ),
                    "{{model}}",
                ),
            ),
        ),
        Graph(
            "Time to first token, all requests",
            "How the percentiles above come about: two groups of requests are not one of their mean.",
            "s",
            (Line(f"sum by (le) ({rate(f'espalier_ttft_seconds_bucket{_OF_MODEL}')})", "{{le}}"),),
            style="heatmap",
        ),
    ),
)

_STEPS = Section(
    "Where a step's time goes",
    (
        Graph(
            "Step time",
            "From a step's plan to its commit.",
            "s",
            _overall("espalier_step_seconds"),
        ),
        Graph(
            "Step time by part, mean",
            "The parts do not overlap; together they are the step. wait: for drafts made ahead that are late and "
            "workers that do not answer; draft_*: drafts asked for in the step; verify_*: the LLM; merge and accept: "
            "the manager's own work.",
            "s",
            (
                Line(
                    f"{total('espalier_step_part_seconds_sum', 'part')}"
                    f" / on () group_left () {total('espalier_steps_total')}",
                    "{{part}}",
                ),
            ),
            style="stacked",
        ),
        Graph(
            "Step time by part, p99",
            "Which part it is that is slow when a step is.",
            "s",
            (Line(quantile(0.99, "espalier_step_part_seconds_bucket", "part"), "{{part}}"),),
        ),
        Graph(
            "Overhead of a step",
            "The step without forwards and without choosing tokens: wire, merge, accept, waiting.",
            "s",
            _overall("espalier_step_overhead_seconds"),
        ),
    ),
)

LATENCY = Board(
    "latency",
    "Latency",
    "How long clients wait, by the name of the model that they asked for, and which part of a step they wait for.",
    (_CLIENTS, _STEPS),
    (
        Variable(
            "model",
            f"espalier_ttft_seconds_count{{{SCOPE}}}",
            "model",
        ),
    ),
)
