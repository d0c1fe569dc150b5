"""What `--ssm` names."""

import pytest

from ssm_worker.settings import SsmSettings
from treecore.errors import ConfigError
from treecore.service.settings import read_settings


def test_a_shipped_ssm_is_found_in_the_package() -> None:
    """By its name, wherever the package is installed."""
    found = read_settings(SsmSettings, ["--ssm", "shipped:smollm2-135m-draft"]).ssm
    assert found is not None
    assert (found / "config.json").is_file()


@pytest.mark.parametrize("name", ["smollm", "", "..", "../artefacts/smollm2-135m-draft"])
def test_one_that_does_not_ship_is_named(name: str) -> None:
    """With those that do."""
    with pytest.raises(ConfigError, match=r"--ssm: .*in this package, but: smollm2-135m-draft"):
        read_settings(SsmSettings, ["--ssm", f"shipped:{name}"])
