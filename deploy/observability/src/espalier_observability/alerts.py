"""The alerts: what is wrong for clients, or soon will be, and what somebody can do about it.

Each has a section in docs/operations.md, under its name. All tell the release; none needs a label that a plain static
scrape does not give.
"""

import json
from dataclasses import dataclass
from textwrap import indent
from typing import Literal

from espalier_observability.objectives import TTFT_LE, TTFT_OBJECTIVE, TTFT_TARGET_S
from espalier_observability.promql import ANSWERS, PROCESS, RELEASE, TURNED_AWAY

RUNBOOKS = "docs/operations.md"
"""Where the runbooks are. The chart replaces it with its value monitoring.prometheusRule.runbooks."""

_PROCESS = ", ".join((RELEASE, *PROCESS))
_WHERE = "{{ $labels.namespace }}/{{ $labels.app_kubernetes_io_instance }}"


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition that must hold for `lasting` (Prometheus' notation) before somebody hears of it."""

    name: str
    severity: Literal["critical", "warning"]
    lasting: str
    expr: str
    summary: str
    description: str


def _late(window: str) -> str:
    """How many times faster than the objective allows first tokens are late."""
    within = f"sum by ({RELEASE}) (rate(espalier_ttft_seconds_bucket{{{TTFT_LE}}}[{window}]))"
    every = f"sum by ({RELEASE}) (rate(espalier_ttft_seconds_count[{window}]))"
    return f"(1 - {within} / {every}) / {1 - TTFT_OBJECTIVE:g}"


def _burns(times: float, long: str, short: str) -> str:
    """Over the long window, and still in the short one, so that it ends with its cause; not of a few requests."""
    enough = f"sum by ({RELEASE}) (increase(espalier_ttft_seconds_count[{long}])) > {_FEW_REQUESTS}"
    return f"({_late(long)} > {times:g}\nand {_late(short)} > {times:g}\nand {enough})"


_FEW_REQUESTS = 50


def _first_accepted(window: str) -> str:
    """The share of trees in which the LLM agreed with a child of the root: it depends on load less than others do."""
    accepted = f'sum by ({RELEASE}) (rate(espalier_accepted_tokens_total{{depth="1"}}[{window}]))'
    return f"({accepted} / sum by ({RELEASE}) (rate(espalier_trees_total[{window}])))"


ALERTS = (
    Alert(
        "EspalierNoVerifier",
        "critical",
        "3m",
        f'(max by ({RELEASE}) (espalier_workers{{kind="verifier"}})'
        f"\nor 0 * count by ({RELEASE}) (espalier_bus_connected)) < 1",
        "no verifier, nobody gets an answer",
        "No manager hears of a verifier group. Requests wait, and fail once they have waited for the manager's "
        "max_pause_s.",
    ),
    Alert(
        "EspalierTtftBudgetFast",
        "critical",
        "2m",
        f"{_burns(14.4, '1h', '5m')}\nor\n{_burns(6, '6h', '30m')}",
        f"first tokens are late (beyond {TTFT_TARGET_S} s) {{{{ $value | humanize }}}} times as often as allowed",
        f"The objective is {TTFT_OBJECTIVE:.0%} within {TTFT_TARGET_S} s. At this rate what may be late in 30 days "
        "is used up within days.",
    ),
    Alert(
        "EspalierTtftBudgetSlow",
        "warning",
        "15m",
        _burns(1, "3d", "6h"),
        f"first tokens are late (beyond {TTFT_TARGET_S} s) {{{{ $value | humanize }}}} times as often as allowed",
        f"The objective is {TTFT_OBJECTIVE:.0%} within {TTFT_TARGET_S} s. On the whole it is missed.",
    ),
    Alert(
        "EspalierQueueGrowth",
        "warning",
        "5m",
        f'sum by ({RELEASE}) (deriv(espalier_requests{{state="waiting"}}[10m]) * 60) > 0.5'
        f'\nand sum by ({RELEASE}) (espalier_requests{{state="waiting"}})'
        f' / sum by ({RELEASE}) (espalier_requests{{state="running"}}) > 1',
        "the queue grows by {{ $value | humanize }} requests a minute",
        "More requests wait than run, and their number grows: more comes in than the verifier groups can do.",
    ),
    Alert(
        "EspalierTurnsAway",
        "warning",
        "5m",
        f"sum by ({RELEASE}) (rate({TURNED_AWAY}[5m]))\n/ sum by ({RELEASE}) (rate({ANSWERS}[5m])) > 0.01",
        "{{ $value | humanizePercentage }} of the requests are turned away (429)",
        "The queue is as long as it may be (manager's max_waiting); clients are told to come back later.",
    ),
    Alert(
        "EspalierAcceptanceCollapse",
        "warning",
        "15m",
        f"{_first_accepted('30m')}\n/ {_first_accepted('1d')} < 0.5"
        f"\nand sum by ({RELEASE}) (rate(espalier_trees_total[30m])) > 0.1",
        "SSMs guess the next token {{ $value | humanizePercentage }} as often as in the last day",
        "Answers are right, but slower: what SSMs draft is hardly ever what the LLM says.",
    ),
    Alert(
        "EspalierWorkerLosses",
        "warning",
        "0m",
        f'max by ({RELEASE}, kind) (increase(espalier_worker_losses_total{{reason!="left"}}[30m])) > 1.5',
        "workers of kind {{ $labels.kind }} were lost again and again ({{ $value | humanize }} times in 30 minutes)",
        "They went without a word: they died, hang, or cannot reach the broker. A lost verifier costs a pause and the"
        " prompts once more, a lost SSM costs speed.",
    ),
    Alert(
        "EspalierRankRestarts",
        "warning",
        "0m",
        f"max by ({_PROCESS}) (changes(espalier_process_start_time_seconds[30m])) > 1.5",
        "{{ or $labels.pod $labels.instance }} began anew {{ $value }} times in 30 minutes",
        "A process keeps ending. If it is a rank of a verifier group, all ranks of the group begin anew with it.",
    ),
    Alert(
        "EspalierSlowConsumer",
        "warning",
        "0m",
        f'sum by ({_PROCESS}) (increase(espalier_bus_errors_total{{kind="slow_consumer"}}[10m])) > 0',
        "messages to {{ or $labels.pod $labels.instance }} were lost",
        "The process did not take messages as fast as they came, and NATS dropped some. What was lost is asked for "
        "again, after a pause.",
    ),
)


def to_yaml() -> str:
    """A rule file."""
    return "groups:\n- name: espalier\n  rules:\n" + "".join(map(_rule, ALERTS))


def _rule(alert: Alert) -> str:
    """As Prometheus reads it. A string of JSON is one of YAML."""
    summary = json.dumps(f"Espalier {_WHERE}: {alert.summary}")
    return f"""\
  - alert: {alert.name}
    expr: |-
{indent(alert.expr, " " * 6)}
    for: {alert.lasting}
    labels: {{severity: {alert.severity}}}
    annotations:
      summary: {summary}
      description: {json.dumps(alert.description)}
      runbook_url: {RUNBOOKS}#{alert.name.lower()}
"""
