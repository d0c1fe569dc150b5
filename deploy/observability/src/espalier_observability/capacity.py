"""The dashboard *Capacity*: how much there is to do, how much can be done, and who was turned away."""

from espalier_observability.board import Board, Graph, Line, Section
from espalier_observability.promql import ANSWERS, TURNED_AWAY, quantile, ratio, total

_LOAD = Section(
    "Load",
    (
        Graph(
            "Requests",
            "At managers: running take part in steps, waiting do not yet.",
            "short",
            (Line("sum by (state) (espalier_requests)", "{{state}}"),),
            style="stacked",
        ),
        Graph(
            "Streams of gateways",
            "placed with a manager, or waiting for one; of gateways that are processes of their own.",
            "short",
            (Line("sum by (state) (espalier_streams)", "{{state}}"),),
            style="stacked",
        ),
        Graph(
            "Tokens",
            "Per second: in answers; in prompts that the verifier read or had cached.",
            "cps",
            (
                Line(total("espalier_generated_tokens_total"), "generated"),
                Line(total("espalier_prompt_tokens_total"), "prompts"),
            ),
        ),
        Graph(
            "Requests of a step",
            "The batch that the verifier sees.",
            "short",
            (
                Line(ratio("espalier_step_requests_sum", "espalier_step_requests_count"), "mean"),
                Line(quantile(0.99, "espalier_step_requests_bucket"), "p99"),
            ),
        ),
    ),
)

_CACHE = Section(
    "KV cache",
    (
        Graph(
            "Verifiers' blocks",
            "used: by running requests; cached: of prompts that may come again, given up when there is need; free.",
            "short",
            (Line('sum by (state) (espalier_worker_kv_blocks{kind="verifier", state!="total"})', "{{state}}"),),
            style="stacked",
        ),
        Graph(
            "Blocks in use",
            "Share of each worker's blocks that running requests hold. At 100 % younger requests wait.",
            "percentunit",
            (
                Line(
                    'max by (kind, name) (espalier_worker_kv_blocks{state="used"}'
                    ' / ignoring (state) espalier_worker_kv_blocks{state="total"})',
                    "{{kind}} {{name}}",
                ),
            ),
        ),
        Graph(
            "Prefix hits",
            "Share of the prompts' tokens that the verifier had cached.",
            "percentunit",
            (Line(ratio("espalier_cached_prompt_tokens_total", "espalier_prompt_tokens_total"), "cached"),),
        ),
        Graph(
            "Preemptions",
            "Requests per second that lost their blocks to older ones and waited again. More than a few: too many "
            "requests run for the cache (manager.settings.maxBatch, verifier.settings.kvTokens).",
            "cps",
            (Line(total("espalier_preemptions_total"), "preemptions"),),
        ),
    ),
)

_ANSWERS = Section(
    "Answers",
    (
        Graph(
            "Exchanges by status",
            "429: turned away because too many wait. 499: the client left first. 503: no verifier, or the gateway is "
            "leaving.",
            "reqps",
            (Line(total("espalier_http_requests_total", "code"), "{{code}}"),),
        ),
        Graph(
            "Turned away",
            "Share of the requests for an answer that got 429.",
            "percentunit",
            (Line(f"({total(TURNED_AWAY)} or vector(0)) / {total(ANSWERS)}", "429"),),
        ),
        Graph(
            "Errors told to clients",
            "As an answer or within a stream, by the code that they saw.",
            "reqps",
            (Line(total("espalier_errors_total", "code"), "{{code}}"),),
        ),
        Graph(
            "Hand-overs",
            "Requests per second that a manager has gone on with behind another one.",
            "reqps",
            (Line(total("espalier_readmissions_total"), "hand-overs"),),
        ),
    ),
)

CAPACITY = Board(
    "capacity",
    "Capacity",
    "How much there is to do, how full the verifiers' caches are, and who was turned away.",
    (_LOAD, _CACHE, _ANSWERS),
)
