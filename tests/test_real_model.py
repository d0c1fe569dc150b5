"""SmolLM2 and its shipped SSM, through what users use (the large sets: `espalier bench identity`)."""

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from espalier_local.cache import ModelCache
from espalier_local.cli import main
from espalier_local.models import resolve_model, shipped_ssm
from espalier_local.system import LocalSystem, SystemConfig

pytestmark = pytest.mark.weights

Body = dict[str, Any]

PROMPTS = (
    "Write three short sentences about rain.",
    "red red red red red red red red red red red red",
    "List two fruits and two colours as JSON.",
    "What is 12 times 12?",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
CHOICES: dict[str, list[Any]] = {
    "temperature": [0, 0, 0.6, 1.0, 1.5],
    "top_p": [1.0, 0.9, 0.5],
    "top_k": [0, 5, 40],
    "min_p": [0.0, 0.05],
    "presence_penalty": [0, 1.5, -1],
    "frequency_penalty": [0, 0.7],
    "repetition_penalty": [1.0, 1.3],
    "logit_bias": [{}, {"198": -100, "28": 5}],
    "min_tokens": [0, 12],
    "stop": [[], ["\n"], ["the", "zzz"]],
    "stop_token_ids": [[], [28, 30]],
    "ignore_eos": [False, True],
    "logprobs": [False, True],
    "n": [1, 2],
    "response_format": [
        *[{"type": "text"}] * 4,
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
    ],
}


def combination(seed: int) -> Body:
    """Every parameter at random, the same on every run."""
    rng = random.Random(seed)
    fields = {name: rng.choice(values) for name, values in CHOICES.items()}
    if fields["logprobs"]:
        fields["top_logprobs"] = rng.choice([0, 3])
    return {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": rng.choice(PROMPTS)}],
        "max_tokens": 24,
        "seed": seed,
        **fields,
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real_client() -> AsyncIterator[httpx.AsyncClient]:
    """A client of the real pair in fp32."""
    name = "smollm2-135m-instruct"
    model, ssm = resolve_model(name, ModelCache.from_environment(), lambda *_: None), shipped_ssm(name)
    assert ssm is not None
    async with (
        LocalSystem(SystemConfig(model=model, ssms=(ssm,), tree=(3, 2, 1))) as system,
        httpx.AsyncClient(base_url=system.base_url, timeout=120, trust_env=False) as client,
    ):
        yield client


async def answer(client: httpx.AsyncClient, body: Body, **extension: Any) -> Body:
    """One chat completion, with token ids."""
    extension["return_token_ids"] = True
    response = await client.post("/v1/chat/completions", json={**body, "espalier": extension})
    assert response.status_code == 200, response.text
    found: Body = response.json()
    return found


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("seed", range(20))
async def test_every_parameter_with_speculation_and_without(real_client: httpx.AsyncClient, seed: int) -> None:
    """The same tokens, texts, ends and counts; log-probs to what fp32 leaves of them in other batch shapes."""
    body = combination(seed)
    on = await answer(real_client, body)
    off = await answer(real_client, body, speculation=False)
    assert on["espalier"]["token_ids"] == off["espalier"]["token_ids"]
    for told in (on, off):
        del told["usage"]["prompt_tokens_details"]  # what is cached depends on who came before
    assert on["usage"] == off["usage"]
    for ours, theirs in zip(on["choices"], off["choices"], strict=True):
        told, wanted = ours.pop("logprobs"), theirs.pop("logprobs")
        assert ours == theirs
        assert (told is None) == (wanted is None)
        if told is not None:
            assert [entry["logprob"] for entry in told["content"]] == pytest.approx(
                [entry["logprob"] for entry in wanted["content"]], abs=1e-3
            )


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("rule", ["naive", "multi_step", "multi_step_iid"])
async def test_the_other_rules_answer_too(real_client: httpx.AsyncClient, rule: str) -> None:
    """Text of the asked length, with drafts accepted; naive with the very tokens of incremental decoding."""
    body = {**combination(0), "temperature": 0.7, "stop": [], "stop_token_ids": [], "ignore_eos": True, "n": 1}
    found = await answer(real_client, {**body, "response_format": {"type": "text"}}, verification=rule)
    assert found["usage"]["completion_tokens"] == 24
    assert found["espalier"]["steps"] < 24
    if rule == "naive":
        off = await answer(real_client, {**body, "response_format": {"type": "text"}}, speculation=False)
        assert found["espalier"]["token_ids"] == off["espalier"]["token_ids"]


def test_on_equals_off_equals_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy and sampled, fp32, token for token; transformers is the independent oracle."""
    assert main(["bench", "identity", "--num-prompts", "3", "--max-tokens", "24", "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all("3/3 prompts identical" in line for line in lines)


def test_generate_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    """The fields that scripts rely on; the shipped SSM makes steps yield more than one token."""
    ask = ["generate", "List three fruits.", "--chat", "--json", "--max-tokens", "48", "--threads", "1"]
    assert main(ask) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer.keys() == {
        *("text", "token_ids", "finish_reason", "seed", "steps", "tokens_per_step", "ms_per_token"),
    }
    assert answer["steps"] < len(answer["token_ids"])
    assert answer["tokens_per_step"] == pytest.approx(len(answer["token_ids"]) / answer["steps"], abs=0.01)
