"""Whole systems for tests that cross services: real processes, a real broker, small random models."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from espalier_local.models import ServedModel
from espalier_local.system import LocalSystem, SystemConfig
from treecore.testing.tiny import save_random_llama


@pytest.fixture(scope="session")
def llm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The LLM of the tests."""
    return save_random_llama(tmp_path_factory.mktemp("llm"), num_layers=2, seed=0)


@pytest.fixture(scope="session")
def rubbish_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SSM that knows nothing of the LLM."""
    return save_random_llama(tmp_path_factory.mktemp("rubbish"), num_layers=1, seed=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(llm_dir: Path, rubbish_dir: Path) -> AsyncIterator[LocalSystem]:
    """A system with two SSMs, one that always agrees with the LLM (the LLM itself) and one that hardly ever does."""
    llm = ServedModel("tiny", llm_dir)
    ssms = (ServedModel("itself", llm_dir), ServedModel("rubbish", rubbish_dir))
    async with LocalSystem(SystemConfig(model=llm, ssms=ssms, tree=(2, 1, 1))) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(system: LocalSystem) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of that system."""
    async with httpx.AsyncClient(base_url=system.base_url, timeout=60, trust_env=False) as connection:
        yield connection
