"""A system whose only SSM has no weights: it drafts what repeats, and nobody can tell but by the number of steps."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from espalier_local.models import ServedModel
from espalier_local.system import LocalSystem, SystemConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The fox ran. The dog ran. The fox ran. The dog"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(llm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of a system that drafts from its texts, and from a corpus."""
    corpus = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    corpus.write_text('{"text": "The dog ran and the fox slept."}\n')
    llm = ServedModel("tiny", llm_dir)
    ssms = (ServedModel("suffix", llm_dir, "suffix"), ServedModel("corpus", llm_dir, "suffix", corpus))
    async with (
        LocalSystem(SystemConfig(model=llm, ssms=ssms, tree=(2, 1, 1))) as system,
        httpx.AsyncClient(base_url=system.base_url, timeout=60, trust_env=False) as connection,
    ):
        yield connection


async def complete(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """One completion's JSON, with token ids."""
    extension = {"return_token_ids": True, **fields.pop("espalier", {})}
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 80, "espalier": extension, **fields}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


FORCED = {"guided_regex": r"(The dog ran\. ){6}"}
REPEATING = [
    {"temperature": 0, **FORCED},
    {"temperature": 1, "seed": 3, **FORCED},
    {"temperature": 1, "seed": 4, "logit_bias": {"98": 100}},
]


@pytest.mark.parametrize("fields", REPEATING)
async def test_what_repeats_is_drafted_and_changes_nothing(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    """On == off, in far fewer steps: a grammar that the SSM does not know, a bias that makes one token repeat."""
    on = await complete(client, **fields)
    off = await complete(client, **fields, espalier={"speculation": False})
    assert on["choices"] == off["choices"]
    assert on["espalier"]["steps"] < 0.5 * off["espalier"]["steps"]


@pytest.mark.parametrize("draft_ahead", [False, True])
async def test_repeats_grow_dynamic_trees(client: httpx.AsyncClient, draft_ahead: bool) -> None:
    """Best first, and while the LLM verifies."""
    extension = {"tree": "dynamic", "draft_ahead": draft_ahead}
    on = await complete(client, temperature=1, seed=3, espalier=extension, **FORCED)
    off = await complete(client, temperature=1, seed=3, espalier={"speculation": False}, **FORCED)
    assert on["choices"] == off["choices"]
    assert on["espalier"]["steps"] < off["espalier"]["steps"]


@pytest.mark.parametrize("temperature", [0, 0.7, 1.5])
async def test_text_that_does_not_repeat_is_not_changed(client: httpx.AsyncClient, temperature: float) -> None:
    """On == off, whatever the drafts were."""
    on = await complete(client, temperature=temperature, seed=5)
    off = await complete(client, temperature=temperature, seed=5, espalier={"speculation": False})
    assert on["choices"] == off["choices"]


@pytest.mark.parametrize("rule", ["multi_step", "multi_step_iid"])
async def test_draws_of_repeats_are_accepted(client: httpx.AsyncClient, rule: str) -> None:
    """The rules that need the drafts' law get it."""
    answer = await complete(client, temperature=1, seed=1, espalier={"verification": rule}, **FORCED)
    assert answer["choices"][0]["text"] == "The dog ran. " * 6
    assert answer["espalier"]["steps"] < 0.5 * len(answer["espalier"]["token_ids"][0])
