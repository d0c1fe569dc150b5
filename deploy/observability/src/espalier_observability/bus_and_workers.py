"""The dashboard *Bus and workers*: the broker's links, and the processes that draft and verify."""

from espalier_observability.board import Board, Graph, Line, Section
from espalier_observability.promql import PROCESS, ratio, total

_BY_PROCESS = ", ".join(PROCESS)
_PROCESS = "{{pod}} {{instance}}"
_OF_MANAGERS = "and on (namespace, instance) espalier_steps_total"  # gateways and workers use the bus too


def _per_token(requests: str) -> str:
    counted = f"rate({requests}[$__rate_interval]) {_OF_MANAGERS}"
    return f"sum ({counted}) / {total('espalier_tokens_committed_total')}"


_BUS = Section(
    "Bus",
    (
        Graph(
            "Bytes per committed token",
            "Of messages between managers and workers, both directions.",
            "bytes",
            (Line(_per_token('espalier_bus_bytes_total{call="request"}'), "bytes"),),
        ),
        Graph(
            "Round trips per committed token",
            "A step makes one with each worker, however many requests it has.",
            "short",
            (Line(_per_token('espalier_bus_messages_total{call="request", direction="received"}'), "round trips"),),
        ),
        Graph(
            "Bytes",
            "Over all links to the broker; what one process sends another one receives.",
            "Bps",
            (Line(total("espalier_bus_bytes_total", "call", "direction"), "{{call}} {{direction}}"),),
        ),
        Graph(
            "Links",
            "1 while a process has its link to the broker.",
            "short",
            (Line(f"min by ({_BY_PROCESS}) (espalier_bus_connected)", _PROCESS),),
        ),
        Graph(
            "Broken links and lost messages",
            "In the last 5 minutes: links that came back, and messages that NATS dropped because a process was too "
            "slow to take them.",
            "short",
            (
                Line(f"sum by ({_BY_PROCESS}) (increase(espalier_bus_reconnects_total[5m]))", f"reconnects {_PROCESS}"),
                Line(
                    f'sum by ({_BY_PROCESS}) (increase(espalier_bus_errors_total{{kind="slow_consumer"}}[5m]))',
                    f"dropped {_PROCESS}",
                ),
            ),
        ),
        Graph(
            "Requests without an answer",
            "unreachable: nobody was there to ask; unanswered: somebody was asked and said nothing in time.",
            "cps",
            (Line(total("espalier_bus_failed_requests_total", "reason"), "{{reason}}"),),
        ),
        Graph(
            "Errors of the broker's client",
            "As it reports them.",
            "cps",
            (Line(total("espalier_bus_errors_total", *PROCESS, "kind"), f"{{{{kind}}}} {_PROCESS}"),),
        ),
    ),
)

_WORKERS = Section(
    "Workers",
    (
        Graph(
            "Live workers",
            "As the process that hears of most counts them. Who was there once and is gone is 0.",
            "short",
            (Line("max by (kind, name) (espalier_workers)", "{{kind}} {{name}}"),),
        ),
        Graph(
            "Workers lost",
            "In the last 5 minutes. left: said goodbye, as in a roll-out; silent: did not announce itself; "
            "unanswered: found dead by who asked it.",
            "short",
            (Line("max by (kind, reason) (increase(espalier_worker_losses_total[5m]))", "{{kind}} {{reason}}"),),
        ),
        Graph(
            "Utilisation",
            "Share of time that a worker spends in steps.",
            "percentunit",
            (
                Line(
                    total("espalier_worker_busy_seconds_total", "kind", "name", *PROCESS),
                    f"{{{{kind}}}} {{{{name}}}} {_PROCESS}",
                ),
            ),
        ),
        Graph(
            "Where a worker's time goes",
            "Share of its steps' time in the model's forwards, and in choosing tokens; the rest is the worker's books.",
            "percentunit",
            (
                Line(
                    ratio(
                        "espalier_worker_forward_seconds_total", "espalier_worker_busy_seconds_total", "kind", "name"
                    ),
                    "{{kind}} {{name}} forward",
                ),
                Line(
                    ratio("espalier_worker_sample_seconds_total", "espalier_worker_busy_seconds_total", "kind", "name"),
                    "{{kind}} {{name}} sample",
                ),
            ),
        ),
        Graph(
            "Steps",
            "Answered per second.",
            "cps",
            (Line(total("espalier_worker_steps_total", "kind", "name"), "{{kind}} {{name}}"),),
        ),
        Graph(
            "Work of a step",
            "Requests, committed tokens and nodes that came with a step, on average.",
            "short",
            tuple(
                Line(
                    ratio(f"espalier_worker_{what}_total", "espalier_worker_steps_total", "kind", "name"),
                    f"{{{{kind}}}} {{{{name}}}} {what}",
                )
                for what in ("items", "tokens", "nodes")
            ),
        ),
        Graph(
            "Items refused",
            "By workers, per second. state_missing: the worker did not have a request's tokens, and got them again.",
            "cps",
            (Line(total("espalier_worker_refused_items_total", "kind", "reason"), "{{kind}} {{reason}}"),),
        ),
        Graph(
            "Steps planned again",
            "Per second. unreachable: the verifier was not there; lost: it did not answer, or not usably.",
            "cps",
            (Line(total("espalier_steps_retried_total", "reason"), "{{reason}}"),),
        ),
    ),
)

_PROCESSES = Section(
    "Processes",
    (
        Graph(
            "CPU",
            "Cores in use.",
            "short",
            (Line(total("espalier_process_cpu_seconds_total", *PROCESS), _PROCESS),),
        ),
        Graph(
            "Memory",
            "Resident.",
            "bytes",
            (Line(f"sum by ({_BY_PROCESS}) (espalier_process_resident_memory_bytes)", _PROCESS),),
        ),
        Graph(
            "Starts",
            "How often a process began anew in the last 30 minutes, at the same address. All ranks of a group do when"
            " one dies.",
            "short",
            (Line(f"sum by ({_BY_PROCESS}) (changes(espalier_process_start_time_seconds[30m]))", _PROCESS),),
        ),
        Graph(
            "Open files",
            "Share of what the process may have; each stream of a client is one.",
            "percentunit",
            (Line(f"sum by ({_BY_PROCESS}) (espalier_process_open_fds / espalier_process_max_fds)", _PROCESS),),
        ),
    ),
)

BUS_AND_WORKERS = Board(
    "bus-and-workers",
    "Bus and workers",
    "The broker's links and what goes over them; who drafts and verifies, how busy they are, who was lost.",
    (_BUS, _WORKERS, _PROCESSES),
)
