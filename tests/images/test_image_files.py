"""What images are made of, and the compose file: checked without building or starting anything."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from build_images import DOCKERFILE, TARGETS, Options, PipSource, build_command, own_version, pip_source
from compose_spec import PyCompose
from requirements import projects_below, third_party

from llm_verifier.settings import VerifierSettings
from request_manager.settings import ManagerSettings
from ssm_worker.settings import SsmSettings
from treecore.service.settings import ServiceSettings, read_settings

ROOT = DOCKERFILE.parents[1]
COMPOSE = DOCKERFILE.with_name("compose.yaml")
SERVICES = {"gateway": ManagerSettings, "manager": ManagerSettings, "ssm": SsmSettings, "verifier": VerifierSettings}
OPTIONS = Options("buildah", "cpu", "espalier", own_version(), "abc", "", "", None)
NO_SOURCE = PipSource("[global]\n", None, ())


def name_of(requirement: str) -> str:
    """`treecore[model]` without what follows the name."""
    return re.split(r"[\[<>=!~; ]", requirement)[0].lower()


def compose() -> dict[str, Any]:
    """The compose file, with its variables' defaults in place."""
    text = COMPOSE.read_text(encoding="utf-8")
    with_defaults = re.sub(r"\$\{\w+(?::-([^}]*)|:\?[^}]*)\}", lambda match: match[1] or "/given", text)
    assert "$" not in with_defaults
    return yaml.safe_load(with_defaults)


def compose_service(name: str) -> dict[str, Any]:
    """One service of it."""
    return compose()["services"][name]


def test_the_dockerfile_has_no_findings() -> None:
    """A real hadolint, without any rule ignored."""
    hadolint = Path(sys.executable).with_name("hadolint")
    found = subprocess.run([hadolint, "--no-color", DOCKERFILE], check=False, capture_output=True, text=True)
    assert found.stdout + found.stderr == ""
    assert found.returncode == 0


def test_what_is_shipped_runs_as_a_number_and_nothing_ran_in_it() -> None:
    """A cluster can tell only of a number that it is not root; what a build leaves behind, it leaves elsewhere."""
    text = DOCKERFILE.read_text(encoding="utf-8")
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", text, re.MULTILINE | re.DOTALL))
    parents = {stage: parent for parent, stage in re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)}
    assert {parents[target] for target in TARGETS if target != "nats"} == {"runtime", "worker"}
    assert parents["worker"] == "runtime"
    for stage in ("runtime", "worker", *TARGETS):
        assert "RUN" not in stages[stage]
    for stage in ("runtime", "nats"):
        assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", stages[stage], re.MULTILINE)


def test_what_a_package_needs_is_found_through_ours_and_their_extras() -> None:
    """Dependencies of dependencies of ours; extras only where they are named."""
    projects = {
        "ours": {"dependencies": ["core[fast]", "far[x]>=1"], "optional-dependencies": {"more": ["extra"]}},
        "core": {"dependencies": ["deep"], "optional-dependencies": {"fast": ["speed"], "slow": ["never"]}},
    }
    assert set(third_party(projects, ["ours"])) == {"deep", "speed", "far[x]>=1"}
    assert set(third_party(projects, ["ours[more]"])) == {"deep", "speed", "far[x]>=1", "extra"}
    with pytest.raises(KeyError):
        list(third_party(projects, ["ours[typo]"]))


def test_images_are_made_of_pinned_versions() -> None:
    """Whatever the Dockerfile installs for a service, constraints.txt says which."""
    installed = re.findall(r"\./install\.sh (.*)$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    wanted = shlex.split(" ".join(installed))
    assert {"request-manager", "request-manager[scaler]", "ssm-worker", "llm-verifier"} < set(wanted)
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    needed = {name_of(requirement) for requirement in third_party(projects_below(ROOT), wanted)}
    assert needed
    assert needed <= pinned


def test_the_request_manager_has_no_torch_and_the_workers_have() -> None:
    """By what their packages ask for."""
    projects = projects_below(ROOT)
    assert "torch" not in set(third_party(projects, ["request-manager[scaler]"]))
    assert "torch" in set(third_party(projects, ["llm-verifier"]))


def test_the_hosts_pip_configuration_becomes_one_for_the_build() -> None:
    """The environment wins; certificates are a secret at a place of their own; an index's files lie beside it."""
    listing = (
        "global.cert='/etc/ca.crt'\nglobal.extra-index-url='file:///srv/mirror/simple https://example.org/simple'\n"
        "global.find-links='/srv/old'\n:env:.find-links='/srv/wheels\\n/srv/mirror'\nglobal.no-input='1'\n"
    )
    source = pip_source(listing)
    assert source.ca_bundle == Path("/etc/ca.crt")
    assert source.directories == (Path("/srv/mirror"), Path("/srv/wheels"))
    assert sorted(source.config.splitlines()) == [
        "[global]",
        "cert = /run/secrets/ca.pem",
        "extra-index-url = file:///srv/mirror/simple https://example.org/simple",
        "find-links = /srv/wheels /srv/mirror",
    ]


def test_a_host_without_configuration_lends_nothing() -> None:
    """No secret of certificates, no directory."""
    assert pip_source("") == NO_SOURCE


def test_where_packages_come_from_is_no_build_argument() -> None:
    """Build arguments stay in an image's history; secrets do not."""
    source = PipSource("[global]\nindex-url = https://me:secret@example.org\n", Path("/ca.crt"), (Path("/srv/wheels"),))
    command = build_command(OPTIONS, "base", "ssm-worker", source, Path("/run"))
    assert not [part for part in command if "example.org" in part]
    assert {"--secret=id=pip.conf,src=/run/pip.conf", "--secret=id=ca.pem,src=/ca.crt"} <= set(command)
    assert "--volume=/srv/wheels:/srv/wheels:ro" in command
    assert "espalier/ssm-worker:" + own_version() + "-cpu" in command


def test_the_compose_file_is_one_by_its_specification() -> None:
    """And what it refers to is there."""
    parsed = PyCompose.from_yaml(json.dumps(compose()))
    parsed.validate()
    assert {"nats", *SERVICES} <= set(parsed.service_names())
    for service in compose()["services"].values():
        sources = [volume.partition(":")[0] for volume in service.get("volumes", ())]
        assert all((COMPOSE.parent / source).exists() for source in sources if source.startswith("."))


def test_compose_runs_the_images_that_are_built_here() -> None:
    """Under the names and tags that `make images` gives, each built from its own target."""
    ours = {name: each for name, each in compose()["services"].items() if "build" in each}
    assert set(ours) == {"nats", *SERVICES}
    for service in ours.values():
        assert service["image"] == OPTIONS.image(service["build"]["target"])


@pytest.mark.parametrize("name", ["nats", "prometheus", *SERVICES])
def test_compose_confines_every_part(name: str) -> None:
    """A read-only root, no capabilities, no new privileges; back after a death."""
    service = compose_service(name)
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "always"


@pytest.mark.parametrize(("name", "kind"), SERVICES.items())
def test_services_take_what_compose_tells_them(
    name: str, kind: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every variable is a setting, and every value is accepted."""
    given = {key: str(value) for key, value in compose_service(name)["environment"].items() if key != "OMP_NUM_THREADS"}
    fields = {f"ESPALIER_{field.upper()}" for field in kind.model_fields}
    assert set(given) <= fields
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    assert read_settings(kind, []).broker.url == "nats://nats:4222"


def test_prometheus_scrapes_every_service() -> None:
    """At the port where they tell."""
    (job,) = yaml.safe_load(DOCKERFILE.with_name("prometheus.yml").read_text())["scrape_configs"]
    ports = {name: compose_service(name)["environment"]["ESPALIER_OPERATIONS_PORT"] for name in SERVICES}
    assert set(job["static_configs"][0]["targets"]) == {f"{name}:{port}" for name, port in ports.items()}


def test_the_chart_runs_what_is_built_here_as_whom_it_is_built_for() -> None:
    """Under the same names, each target once; the broker's image alone is the public one."""
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "espalier" / "values.yaml").read_text())
    named = {each["repository"] for each in values["images"].values() if isinstance(each, dict)}
    assert named == {f"espalier/{target}" for target in TARGETS if target != "nats"} | {"nats"}
    user, group = values["security"]["runAsUser"], values["security"]["runAsGroup"]
    assert set(re.findall(r"^USER (.*)$", DOCKERFILE.read_text(), re.MULTILINE)) == {f"{user}:{group}"}


def test_versions_are_one() -> None:
    """Of all packages and of what the chart asks for, so that one tag says it."""
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "espalier" / "Chart.yaml").read_text())
    assert {project["version"] for project in projects_below(ROOT).values()} == {own_version()}
    assert chart["appVersion"] == own_version()
