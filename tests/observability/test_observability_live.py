"""A real Prometheus scrapes a real system under load, and has a number for every panel and every alert.

What is asked is what the chart's files ask. Each selector is asked by itself too: `or` can hide one that is empty, and
a metric that was renamed must fail here.
"""

import asyncio
import itertools
import json
import math
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import yaml

from espalier_local.child import Child, ChildSpec
from espalier_local.models import ServedModel
from espalier_local.ports import ReservedPort
from espalier_local.system import MANAGER, Addresses, LocalSystem, SystemConfig, services

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE_S = 30.0
POLL_S = 0.25
NUM_CLIENTS = 6  # more than run and wait: some are turned away
FEW = ("--max-batch", "2", "--max-waiting", "2")
KUBERNETES = {"namespace": "here", "app_kubernetes_io_instance": "demo"}
PLAIN = dict.fromkeys(KUBERNETES, "")
SCRAPES = {"plain": {}, "kubernetes": KUBERNETES}

SELECTOR = re.compile(r"\b(?:espalier_|vllm:)[a-z0-9_:]+(?:\{[^}]*\})?")
BOUND = re.compile(r" (?:[<>]=?|[!=]=) [\d.]+\b")


def with_few(config: SystemConfig, at: Addresses) -> Iterator[ChildSpec]:
    """A system whose manager has room for two requests, and two that wait."""
    for spec in services(config, at):
        extra = FEW if spec.name == MANAGER else ()
        yield ChildSpec(spec.name, (*spec.argv, *extra), spec.speaks_as, spec.env, spec.group)


@dataclass(frozen=True, slots=True)
class Client:
    """Of the gateway: what it says is of no interest here, only that it comes to an end."""

    http: httpx.AsyncClient

    async def ask(self, idx: int, **fields: Any) -> int:
        """One request, greedy or sampled, with trees of a given shape or dynamic ones; its status."""
        body = {"model": "tiny", "prompt": f"Tell me {idx % 3}", "max_tokens": 12, "seed": idx, "temperature": idx % 2}
        tree = "dynamic" if idx % 3 else [2, 1]
        answer = await self.http.post("/v1/completions", json=body | {"espalier": {"tree": tree}} | fields)
        return answer.status_code

    async def leave(self) -> None:
        """Begin a stream, and go; again if the gateway would not have it."""
        body = {"model": "tiny", "prompt": "Go on", "max_tokens": 100, "stream": True, "temperature": 1}
        while True:
            async with self.http.stream("POST", "/v1/completions", json=body) as stream:
                if stream.status_code == 200:
                    await anext(stream.aiter_lines())
                    return

    async def load(self) -> None:
        """Requests without end, after one that is wrong and one that nobody waits for."""
        assert await self.ask(0, max_tokens=-1) == 400
        await self.leave()
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(self._go_on())

    async def _go_on(self) -> None:
        for idx in itertools.count():
            status = await self.ask(idx)
            assert status in (200, 429)
            if status == 429:
                await asyncio.sleep(POLL_S)  # as clients do that are told to come back


@dataclass(frozen=True, slots=True)
class Prometheus:
    """One that runs, by its API."""

    http: httpx.AsyncClient

    async def numbers(self, expr: str) -> list[float]:
        """The values of an expression's series now, those that are numbers."""
        answer = (await self.http.get("/api/v1/query", params={"query": expr})).json()
        assert answer["status"] == "success", f"{expr}: {answer['error']}"
        found = [float(series["value"][1]) for series in answer["data"]["result"]]
        return [number for number in found if math.isfinite(number)]

    async def unanswered(self, exprs: Iterable[str]) -> set[str]:
        """Those without any number."""
        return {expr for expr in exprs if not await self.numbers(expr)}

    async def until_answered(self, exprs: set[str]) -> None:
        """Fails naming those that still have no number when patience ends."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + PATIENCE_S
        while missing := await self.unanswered(exprs):
            exprs = missing
            if loop.time() > deadline_s:
                pytest.fail("no number:\n" + "\n".join(sorted(missing)), pytrace=False)
            await asyncio.sleep(POLL_S)

    async def rules(self) -> list[dict[str, Any]]:
        """All alerts, as Prometheus sees them."""
        groups = (await self.http.get("/api/v1/rules")).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


def configuration(system: LocalSystem, rules: Path) -> dict[str, Any]:
    """Every operations port scraped each second, without labels and with those that the chart's PodMonitor gives."""
    parts = [name for name in system.child_names if name != "nats"]
    targets = [system.operations_url(name).removeprefix("http://") for name in parts]
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": targets, "labels": labels}]}
            for job, labels in SCRAPES.items()
        ],
    }


@asynccontextmanager
async def running_prometheus(binary: Path, config: dict[str, Any], directory: Path) -> AsyncIterator[Prometheus]:
    """A Prometheus of its own until the body ends."""
    path = directory / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    port = ReservedPort("127.0.0.1", 0)
    address = f"127.0.0.1:{port.number}"
    flags = (f"--config.file={path}", f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address={address}")
    child = await Child.spawn(ChildSpec("prometheus", (str(binary), *flags), "prometheus"), lambda _name, _line: None)
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=10, trust_env=False) as http:
            await ready(http)
            yield Prometheus(http)
    finally:
        await child.stop(PATIENCE_S)
        port.close()


async def ready(http: httpx.AsyncClient) -> None:
    """Until Prometheus says so."""
    async with asyncio.timeout(PATIENCE_S):
        while not await is_ready(http):  # noqa: ASYNC110 - another process: there is no event
            await asyncio.sleep(POLL_S)


async def is_ready(http: httpx.AsyncClient) -> bool:
    """Whether it does now."""
    try:
        return (await http.get("/-/ready")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prometheus(
    llm_dir: Path, rubbish_dir: Path, prometheus_dir: Path, rules: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Prometheus]:
    """Prometheus beside a system of its own, which is under load."""
    llm = ServedModel("tiny", llm_dir)
    ssms = (ServedModel("itself", llm_dir), ServedModel("rubbish", rubbish_dir))
    config = SystemConfig(llm, ssms, split=True, operations=True)
    async with (
        LocalSystem(config, services_of=lambda config, at: tuple(with_few(config, at))) as system,
        running_prometheus(
            prometheus_dir / "prometheus", configuration(system, rules), tmp_path_factory.mktemp("prometheus")
        ) as prometheus,
        httpx.AsyncClient(base_url=system.base_url, timeout=60, trust_env=False) as http,
    ):
        load = asyncio.create_task(Client(http).load())
        yield prometheus
        assert not load.done(), load.exception()
        load.cancel()
        await asyncio.wait({load})


def filled(expr: str, labels: dict[str, str]) -> str:
    """With the variables of a dashboard as Grafana fills them in."""
    values = {"namespace": labels["namespace"], "release": labels["app_kubernetes_io_instance"], "model": ".*"}
    expr = expr.replace("$__rate_interval", "1m")
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], expr)


def board_exprs(chart: Path) -> set[str]:
    """What all panels ask, and the selectors that variables list labels of."""
    exprs = set()
    for path in (chart / "dashboards").glob("*.json"):
        board = json.loads(path.read_text(encoding="utf-8"))
        exprs |= {target["expr"] for panel in board["panels"] for target in panel.get("targets", ())}
        queries = [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
        exprs |= {query.removeprefix("label_values(").rpartition(",")[0] for query in queries}
    return exprs


def with_selectors(exprs: Iterable[str]) -> set[str]:
    """The expressions, and each selector in them by itself."""
    return set(exprs) | {selector for expr in exprs for selector in SELECTOR.findall(expr)}


@pytest.mark.parametrize("labels", [PLAIN, KUBERNETES], ids=SCRAPES)
async def test_every_panel_has_data(prometheus: Prometheus, chart: Path, labels: dict[str, str]) -> None:
    """Whether or not the scrape tells namespace and release."""
    exprs = with_selectors(board_exprs(chart))
    assert len(exprs) > 100
    await prometheus.until_answered({filled(expr, labels) for expr in exprs})


async def test_every_alert_has_data(prometheus: Prometheus, alerts: dict[str, dict[str, Any]]) -> None:
    """Each expression without the bounds, and each selector. Prometheus itself has no complaint about any."""
    exprs = with_selectors(BOUND.sub("", rule["expr"]) for rule in alerts.values())
    assert not any(BOUND.search(expr) for expr in exprs)
    await prometheus.until_answered(exprs)
    seen = await prometheus.rules()
    assert {rule["name"]: rule["health"] for rule in seen} == dict.fromkeys(alerts, "ok")


async def test_a_metric_that_is_renamed_is_missed(prometheus: Prometheus) -> None:
    """The question can have the answer no, also where `or` gives the whole a number."""
    gone = 'sum (rate(espalier_renamed_total{a="b"}[1m])) or vector(0)'
    assert await prometheus.unanswered(with_selectors([gone])) == {'espalier_renamed_total{a="b"}'}
