"""The running system, as its clients see it: right text, right ends, right counts, with speculation and without."""

import asyncio
import re
from typing import Any

import httpx
import pytest

from espalier_local.system import LocalSystem
from treecore.testing.tiny import CONTEXT_LEN

pytestmark = pytest.mark.asyncio(loop_scope="module")

Body = dict[str, Any]


async def complete(client: httpx.AsyncClient, prompt: str | list[int], **fields: Any) -> Body:
    """One completion's JSON, with token ids."""
    extension = {"return_token_ids": True, **fields.pop("espalier", {})}
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "espalier": extension, **fields}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: Body = response.json()
    return answer


async def both_ways(client: httpx.AsyncClient, prompt: str | list[int], **fields: Any) -> Body:
    """The answer with speculation, after checking that it is the answer without."""
    on = await complete(client, prompt, **fields)
    off = await complete(client, prompt, espalier={"speculation": False}, **fields)
    assert on["choices"] == off["choices"]
    for answer in (on, off):
        del answer["usage"]["prompt_tokens_details"]  # what is cached depends on who came before
    assert on["usage"] == off["usage"]
    assert on["espalier"]["token_ids"] == off["espalier"]["token_ids"]
    return on


def token_ids(answer: Body) -> list[int]:
    """The first choice's tokens."""
    ids: list[int] = answer["espalier"]["token_ids"][0]
    return ids


@pytest.mark.parametrize("temperature", [0, 0.7, 1.5])
@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.8}])
async def test_speculation_is_invisible(client: httpx.AsyncClient, temperature: float, limits: Body) -> None:
    """On == off for every way of sampling, and fewer steps with it on."""
    answer = await both_ways(client, "Hello there", temperature=temperature, seed=11, max_tokens=40, **limits)
    assert answer["espalier"]["steps"] < len(token_ids(answer))


async def test_every_length_around_block_boundaries(client: httpx.AsyncClient) -> None:
    """The step before, on and after a block's last slot, for prompts and outputs."""
    for num_prompt in (1, 14, 15, 16, 17, 31, 32, 33):
        await both_ways(client, "x" * num_prompt, max_tokens=20, seed=1, temperature=1)


async def test_max_tokens_1(client: httpx.AsyncClient) -> None:
    """One token, one step, finish_reason length."""
    answer = await both_ways(client, "abc", max_tokens=1, temperature=1, seed=5)
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["espalier"]["steps"] == 1


async def test_a_prompt_that_was_read_before_is_cached(client: httpx.AsyncClient) -> None:
    """Its full blocks before the last token, also where two choices ask for it and where another prompt goes on."""
    prompt = "An opening that nobody else has used, of many blocks. " * 2  # 108 tokens
    first = await complete(client, prompt, max_tokens=2)
    again = await complete(client, prompt, max_tokens=2, n=2, temperature=1)
    longer = await complete(client, prompt + "More", max_tokens=2)
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, again, longer)]
    assert cached == [0, 96, 96]


@pytest.mark.parametrize("num_output", [1, 2, 5])
async def test_prompt_up_to_the_context(client: httpx.AsyncClient, num_output: int) -> None:
    """The last position of the context is usable, and not one more."""
    prompt = "y" * (CONTEXT_LEN - num_output)
    answer = await both_ways(client, prompt, max_tokens=num_output, temperature=1, seed=3)
    assert answer["usage"]["total_tokens"] == CONTEXT_LEN
    refused = await client.post(
        "/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": num_output + 1}
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "max_tokens"


async def test_stop_string_inside_an_accepted_run(client: httpx.AsyncClient) -> None:
    """Pieces of the text as stop strings: text ends before, counts end with them, wherever the steps fell."""
    text = (await complete(client, "Stop here", max_tokens=30, temperature=1, seed=2))["choices"][0]["text"]
    for start in range(2, len(text) - 3, 3):
        stop = text[start : start + 2]
        answer = await both_ways(client, "Stop here", max_tokens=30, temperature=1, seed=2, stop=stop)
        assert answer["choices"][0]["text"] == text[: text.index(stop)]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == len(token_ids(answer)) <= 30


async def test_eos_inside_an_accepted_run(client: httpx.AsyncClient) -> None:
    """Seeds whose text ends by itself: nothing behind EOS, finish_reason stop, EOS counted once."""
    ended = 0
    for seed in range(40):
        answer = await both_ways(client, "End", max_tokens=60, temperature=2, seed=seed)
        ids = token_ids(answer)
        assert 0 not in ids[:-1]
        assert answer["choices"][0]["finish_reason"] == ("stop" if ids[-1] == 0 else "length")
        assert answer["usage"]["completion_tokens"] == len(ids)
        ended += ids[-1] == 0
    assert ended >= 3


async def test_sixteen_streams_equal_their_solo_runs(client: httpx.AsyncClient) -> None:
    """Sixteen requests at once, of mixed seeds and temperatures, each as if it were alone."""
    asks = [
        {"prompt": f"Prompt {idx}", "temperature": idx % 3 / 2, "seed": idx, "max_tokens": 20 + idx}
        for idx in range(16)
    ]
    solo = [await complete(client, **ask) for ask in asks]
    together = await asyncio.gather(*[complete(client, **ask) for ask in asks])
    assert [token_ids(answer) for answer in together] == [token_ids(answer) for answer in solo]


async def test_a_client_that_leaves_frees_its_cache(client: httpx.AsyncClient) -> None:
    """Within a second after the connection is closed no block is in use."""
    body = {"model": "tiny", "prompt": "Go on", "max_tokens": 150, "stream": True, "temperature": 1, "seed": 4}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_lines())
        assert await blocks_used(client) > 0
    async with asyncio.timeout(1):
        while await blocks_used(client) > 0:
            pass


async def blocks_used(client: httpx.AsyncClient) -> float:
    """What the gateway's metrics say of the verifier's cache."""
    metrics = (await client.get("/metrics")).text
    found = re.search(r'^espalier_kv_blocks\{state="used"\} (\S+)$', metrics, re.MULTILINE)
    assert found, metrics
    return float(found[1])


async def test_ssm_equal_to_the_llm_is_always_right(client: httpx.AsyncClient) -> None:
    """With the LLM as its own SSM each step yields the whole depth of the tree and the bonus token."""
    answer = await complete(client, "Same", max_tokens=41, espalier={"tree": [1, 1, 1]}, temperature=1, seed=9)
    num_tokens = len(token_ids(answer))
    assert num_tokens > 20
    assert answer["espalier"]["steps"] == 1 + -(-(num_tokens - 1) // 4)


async def test_a_request_names_the_ssms_that_draft_for_it(client: httpx.AsyncClient) -> None:
    """The text is the same whoever drafts; one that is always right, one that hardly ever is, one that is not here."""
    answers = {
        name: await complete(
            client,
            "Who drafts",
            max_tokens=21,
            temperature=1,
            seed=6,
            ignore_eos=True,
            espalier={"tree": [1, 1, 1], "ssms": [name]},
        )
        for name in ("itself", "rubbish", "nobody")
    }
    ids = token_ids(answers["itself"])
    assert len(ids) == 21
    assert all(token_ids(answer) == ids for answer in answers.values())
    steps = {name: answer["espalier"]["steps"] for name, answer in answers.items()}
    assert (steps["itself"], steps["nobody"]) == (6, 21)
    assert steps["itself"] < steps["rubbish"] <= 21


async def test_replay_from_the_seed_told(client: httpx.AsyncClient) -> None:
    """A request without a seed is told one, and the seed repeats the answer."""
    first = await complete(client, "Again", max_tokens=20, temperature=1)
    again = await complete(client, "Again", max_tokens=20, temperature=1, seed=first["espalier"]["seed"])
    assert token_ids(again) == token_ids(first)
    other = await complete(client, "Again", max_tokens=20, temperature=1)
    assert other["espalier"]["seed"] != first["espalier"]["seed"]


async def test_pids_are_processes_of_their_own(system: LocalSystem) -> None:
    """Every part is its own process."""
    pids = {name: system.pid(name) for name in system.child_names}
    assert len(set(pids.values())) == len(pids) == 5
