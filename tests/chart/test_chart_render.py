"""The chart renders with helm 3 and 4, and Kubernetes takes what it renders: every object, in each way to install."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import pytest

CUSTOM = json.loads((Path(__file__).parent / "custom_resources.json").read_text(encoding="utf-8"))
KUBERNETES = ("1.30", "1.37")


@pytest.fixture(scope="module", autouse=True)
def schemas_read_once() -> Iterator[None]:
    """The library reads megabytes of definitions for every object."""
    with pytest.MonkeyPatch.context() as patch:
        cached = functools.cache(kubernetes_validate.utils.schema_contents)
        patch.setattr(kubernetes_validate.utils, "schema_contents", cached)
        yield


def test_lint(case: tuple[Path, ...], helm: Any, helm3: Any, chart: Path) -> None:
    """Strictly."""
    values = [flag for path in case for flag in ("--values", str(path))]
    for each in (helm, helm3):
        done = each.run("lint", "--strict", chart, *values)
        assert done.returncode == 0, done.stdout + done.stderr


def test_both_helms_render_the_same(case: tuple[Path, ...], helm3: Any, release: Any) -> None:
    """But for the password, which is new each time where there is no cluster to look it up in."""

    def known(found: Any) -> dict[tuple[str, str], Any]:
        objects = {(each["kind"], each["metadata"]["name"]): each for each in found.objects}
        assert len(objects) == len(found.objects), "an object twice"
        return {key: each for key, each in objects.items() if key[0] != "Secret"}

    assert known(helm3.template(*case)) == known(release)


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_valid(release: Any, version: str) -> None:
    """Against the schemas of the oldest and of the newest Kubernetes, where an unknown field is an error."""
    assert release.objects
    for each in release.objects:
        if each["apiVersion"] in CUSTOM:
            jsonschema.validate(each, CUSTOM[each["apiVersion"]])
        else:
            validated = kubernetes_validate.validate(each, version, strict=True)
            assert validated == version
    for template in pod_templates(release):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "PodTemplate", "template": template}, version, strict=True
        )


def pod_templates(release: Any) -> Iterator[Any]:
    """Those in objects that Kubernetes' own schemas do not know."""
    for each in release.of("LeaderWorkerSet"):
        yield each["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def test_an_unknown_field_would_be_found(render: Any) -> None:
    """The check above can fail."""
    each = render().one("Deployment", "gateway")
    broken = {**each, "spec": {**each["spec"], "replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(broken, KUBERNETES[0], strict=True)


def test_monitors_and_alerts_where_their_api_is(render: Any) -> None:
    """Or where somebody asks for them."""
    apis = [f"monitoring.coreos.com/v1/{kind}" for kind in ("PodMonitor", "PrometheusRule")]
    flags = tuple(flag for api in apis for flag in ("--api-versions", api))
    assert len(render(flags=flags).of("PodMonitor")) == len(render(flags=flags).of("PrometheusRule")) == 1
    assert not render().of("PodMonitor") + render().of("PrometheusRule")


def test_dashboards_are_config_maps_with_grafanas_label(render: Any, chart: Path) -> None:
    """One for each file."""
    found = [each for each in render().of("ConfigMap") if "grafana_dashboard" in each["metadata"]["labels"]]
    files = sorted((chart / "dashboards").glob("*.json"))
    assert sorted(key for each in found for key in each["data"]) == [f"demo-{file.name}" for file in files]


def test_the_objective_and_the_runbooks_are_values(render: Any, chart: Path) -> None:
    """Another target is another bucket, in alerts and panels; alerts lead to where the page is published."""
    flags = (
        "--set",
        "monitoring.prometheusRule.enabled=true,monitoring.prometheusRule.runbooks=https://wiki.example/ops",
    )
    release = render(flags=(*flags, "--set-string", "monitoring.ttftTargetS=0.15"))
    (group,) = release.of("PrometheusRule")[0]["spec"]["groups"]
    rules = {rule["alert"]: rule for rule in group["rules"]}
    late = rules["EspalierTtftBudgetFast"]
    assert 'le="0.15"' in late["expr"]
    assert "2.0" not in json.dumps(rules)
    assert "within 0.15 s" in late["annotations"]["description"]
    assert late["annotations"]["runbook_url"] == "https://wiki.example/ops#espalierttftbudgetfast"
    latency = release.one("ConfigMap", "dashboard-latency")["data"]["demo-latency.json"]
    assert latency == (chart / "dashboards" / "latency.json").read_text(encoding="utf-8").replace("2.0", "0.15")
