"""The dashboard *Speculation*: what trees bring, what they cost, and whether the estimates that shape them hold."""

from espalier_observability.board import Board, Graph, Line, Section
from espalier_observability.promql import quantile, rate, ratio, total

_DRAFT_PARTS = 'espalier_step_part_seconds_sum{part=~"wait|draft_.*"}'


def _cost(model: str) -> str:
    return f'max by (name, rows) (espalier_forward_cost_seconds{{model="{model}"}})'


_GAIN = Section(
    "What speculation brings",
    (
        Graph(
            "Tokens per step and request",
            "1 is decoding without speculation. Steps that read a prompt commit nothing and count as well.",
            "short",
            (Line(ratio("espalier_tokens_committed_total", "espalier_step_requests_sum"), "tokens"),),
        ),
        Graph(
            "Accepted nodes of a tree",
            "The mean path that the LLM agrees with; each step yields one token more than that.",
            "short",
            (Line(ratio("espalier_accepted_tokens_total", "espalier_trees_total"), "accepted"),),
        ),
        Graph(
            "Acceptance by depth",
            "Share of trees in which a node at this depth was accepted. Depth 1 is about how well SSMs guess the next"
            " token; how fast it falls is about how far it is worth to draft.",
            "percentunit",
            (
                Line(
                    f"{total('espalier_accepted_tokens_total', 'depth')}"
                    f" / on () group_left () {total('espalier_trees_total')}",
                    "depth {{depth}}",
                ),
            ),
        ),
        Graph(
            "Acceptance by SSM",
            "Share of the nodes that an SSM proposed that were accepted. Large trees have small shares: most of their"
            " nodes are alternatives.",
            "percentunit",
            (Line(ratio("espalier_ssm_accepted_tokens_total", "espalier_ssm_draft_tokens_total", "ssm"), "{{ssm}}"),),
        ),
    ),
)

_TREES = Section(
    "Trees",
    (
        Graph(
            "Nodes of a tree",
            "Mean number of drafted nodes that are verified for a request in a step.",
            "short",
            (Line(ratio("espalier_draft_tokens_total", "espalier_trees_total"), "nodes"),),
        ),
        Graph(
            "Nodes of a step",
            "Drafted nodes that a step verified, of all its requests.",
            "short",
            (Line(f"sum by (le) ({rate('espalier_step_nodes_bucket')})", "{{le}}"),),
            style="heatmap",
        ),
        Graph(
            "Proposed nodes by SSM",
            "Nodes verified per second by who proposed them; several SSMs may have proposed one.",
            "cps",
            (Line(total("espalier_ssm_draft_tokens_total", "ssm"), "{{ssm}}"),),
        ),
        Graph(
            "Tokens of a step",
            "Tokens that a step committed, of all its requests.",
            "short",
            (
                Line(ratio("espalier_step_tokens_sum", "espalier_step_tokens_count"), "mean"),
                Line(quantile(0.99, "espalier_step_tokens_bucket"), "p99"),
            ),
        ),
    ),
)

_HIDDEN = Section(
    "Hidden drafts",
    (
        Graph(
            "Hidden drafts",
            "Share of the trees that were drafted while the LLM was at work, so that nobody waited for them; and the "
            "same since the manager's start.",
            "percentunit",
            (
                Line(ratio('espalier_trees_total{drafted="ahead"}', "espalier_trees_total"), "now"),
                Line(
                    "avg (espalier_draft_hidden_ratio and on (namespace, instance) espalier_steps_total > 0)",
                    "since the start",
                ),
            ),
        ),
        Graph(
            "Waiting for drafts",
            "Share of step time that passes while a step waits for SSMs: wait is for drafts that are late, the others"
            " are drafts that the step asked for itself.",
            "percentunit",
            (
                Line(
                    f"{total(_DRAFT_PARTS, 'part')} / on () group_left () {total('espalier_step_seconds_sum')}",
                    "{{part}}",
                ),
            ),
            style="stacked",
        ),
        Graph(
            "Drafts that came to nothing",
            "Answers, items and announcements that could not be used, per second. no_draft: an SSM's did not come in "
            "time.",
            "cps",
            (Line(total("espalier_answers_dropped_total", "reason"), "{{reason}}"),),
        ),
    ),
)

_ESTIMATES = Section(
    "Estimates that shape dynamic trees",
    (
        Graph(
            "Calibration",
            "Nodes accepted over nodes that should have been. 1 is calibrated; less is optimism: trees are larger "
            "than pays.",
            "short",
            (
                Line(
                    ratio("espalier_expected_accepted_tokens_total", "espalier_expected_tokens_total"),
                    "accepted / expected",
                ),
            ),
        ),
        Graph(
            "Expected and accepted nodes",
            "The same as rates. Fixed trees have no estimate and are not counted.",
            "cps",
            (
                Line(total("espalier_expected_tokens_total"), "expected"),
                Line(total("espalier_expected_accepted_tokens_total"), "accepted"),
            ),
        ),
        Graph(
            "Cost of verification",
            "What a forward of the LLM over so many rows is taken to cost: the flatter, the larger the trees that pay.",
            "s",
            (Line(_cost("verify"), "{{name}}, {{rows}} rows"),),
        ),
        Graph(
            "Cost of drafting",
            "What a forward of each SSM over so many rows is taken to cost.",
            "s",
            (Line(_cost("draft"), "{{name}}, {{rows}} rows"),),
        ),
    ),
)

SPECULATION = Board(
    "speculation",
    "Speculation",
    "What the SSMs' trees bring, what they cost, and whether the estimates that shape them hold.",
    (_GAIN, _TREES, _HIDDEN, _ESTIMATES),
)
