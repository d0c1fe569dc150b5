"""Faults that users met in other servers, as cases for this one; each on a running system of small random models.

Other cases have their tests where the code is: penalties and laws in test_core_law, stop strings, EOS and log-probs in
test_gateway_choice and test_gateway_logprobs, grammars in test_grammar_masks, lengths in test_system, wire messages in
test_core_codec, losses in test_faults, and every combination of parameters in test_parameters.
"""

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from espalier_local.models import ServedModel
from espalier_local.system import LocalSystem, SystemConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

Body = dict[str, Any]
EOS_ID = 0


async def complete(client: httpx.AsyncClient, prompt: str = "Hello", **fields: Any) -> Body:
    """One completion's JSON, with token ids."""
    extension = {"return_token_ids": True, **fields.pop("espalier", {})}
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "espalier": extension, **fields}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: Body = response.json()
    return answer


def texts(answer: Body) -> list[str]:
    """Of all choices."""
    return [choice["text"] for choice in answer["choices"]]


async def counter(client: httpx.AsyncClient, name: str) -> float:
    """The sum of a counter over its labels."""
    metrics = (await client.get("/metrics")).text
    return sum(float(value) for value in re.findall(rf"^{name}_total(?:{{.*}})? (\S+)$", metrics, re.M))


@pytest.mark.parametrize("word", ["a ", "no", "\n"])
async def test_a_word_repeated_48_times(client: httpx.AsyncClient, word: str) -> None:
    """Greedy text behind it changed with speculation elsewhere: cache and batch shape must not show."""
    on = await complete(client, word * 48, temperature=0, max_tokens=60)
    off = await complete(client, word * 48, temperature=0, max_tokens=60, espalier={"speculation": False})
    assert texts(on) == texts(off)


async def test_half_precision_beyond_token_112(llm_dir: Path, rubbish_dir: Path) -> None:
    """Many-token attention rounds unlike one-token attention: in batch-invariant mode no tree changes a bit of it."""
    ssms = (ServedModel("itself", llm_dir), ServedModel("rubbish", rubbish_dir))
    config = SystemConfig(ServedModel("tiny", llm_dir), ssms, dtype="bfloat16", batch_invariant=True, tree=(2, 1, 1))
    async with (
        LocalSystem(config) as system,
        httpx.AsyncClient(base_url=system.base_url, timeout=60, trust_env=False) as client,
    ):
        assert (await client.get("/v1/models/tiny")).json()["espalier"] == {"batch_invariant": True}
        for fields in ({"temperature": 0}, {"temperature": 1.0, "seed": 1}):
            on = await complete(client, max_tokens=150, ignore_eos=True, **fields)
            off = await complete(client, max_tokens=150, ignore_eos=True, espalier={"speculation": False}, **fields)
            assert on["espalier"]["token_ids"] == off["espalier"]["token_ids"]
            assert on["espalier"]["steps"] < off["espalier"]["steps"] == 150


async def test_seeded_and_unseeded_requests_at_once(client: httpx.AsyncClient) -> None:
    """No random state is shared: seeded ones equal their solo runs, unseeded ones are replayed by the seed told."""
    seeds = [7, None, 8, None, 9, None, 7, None]
    fields = [{"temperature": 1.2} | ({} if seed is None else {"seed": seed}) for seed in seeds]
    together = await asyncio.gather(*[complete(client, **more) for more in fields])
    for answer in together:
        alone = await complete(client, temperature=1.2, seed=answer["espalier"]["seed"])
        assert texts(alone) == texts(answer)
    assert texts(together[0]) == texts(together[6])


async def test_seeds_mean_what_they_say(client: httpx.AsyncClient) -> None:
    """The same seed gives the same text; other seeds, and no seed at all, give others."""
    again = [await complete(client, temperature=1.0, seed=3) for _ in range(2)]
    others = [await complete(client, temperature=1.0, **seed) for seed in ({"seed": 4}, {}, {})]
    assert texts(again[0]) == texts(again[1])
    assert len({texts(answer)[0] for answer in [again[0], *others]}) == 4


@pytest.mark.parametrize("min_tokens", [1, 19, 20, 21])
async def test_min_tokens_counts_tokens_not_steps(client: httpx.AsyncClient, min_tokens: int) -> None:
    """EOS is by far the likeliest token, and comes right behind the last one that must be there."""
    answer = await complete(client, temperature=0, min_tokens=min_tokens, logit_bias={str(EOS_ID): 100})
    assert len(answer["espalier"]["token_ids"][0]) == min_tokens + 1
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["espalier"]["steps"] < min_tokens + 1 or min_tokens == 1


async def test_speculation_works_for_every_request(client: httpx.AsyncClient) -> None:
    """Not only for the first one after start."""
    for seed in range(4):
        answer = await complete(client, f"request {seed}", temperature=1.0, seed=seed, ignore_eos=True)
        assert answer["espalier"]["steps"] < 20
        assert answer["usage"]["completion_tokens"] == 40


async def test_temperature_counts(client: httpx.AsyncClient) -> None:
    """N samples differ when hot, and are one and the same when cold."""
    hot = await complete(client, temperature=1.5, n=8, seed=1, ignore_eos=True)
    cold = await complete(client, temperature=0, n=8, ignore_eos=True)
    assert len(set(texts(hot))) == 8
    assert len(set(texts(cold))) == 1


async def test_an_accepted_run_enters_the_penalties_token_by_token(client: httpx.AsyncClient) -> None:
    """With the strongest frequency penalty and a bias towards one token, on equals off however long the runs are."""
    fields: Body = {"temperature": 0, "frequency_penalty": 2.0, "logit_bias": {"98": 12, "99": 11.5}, "max_tokens": 60}
    on = await complete(client, **fields)
    off = await complete(client, espalier={"speculation": False}, **fields)
    assert on["espalier"]["token_ids"] == off["espalier"]["token_ids"]
    assert on["espalier"]["steps"] < 30


async def test_counters_add_up(client: httpx.AsyncClient) -> None:
    """Tokens in the metrics are those in `usage`; no acceptance above what was drafted."""
    names = ("espalier_tokens_committed", "espalier_draft_tokens", "espalier_accepted_tokens")
    before = [await counter(client, name) for name in names]
    answers = [await complete(client, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(3)]
    committed, drafted, accepted = [await counter(client, name) - was for name, was in zip(names, before, strict=True)]
    assert committed == sum(answer["usage"]["completion_tokens"] for answer in answers) == 120
    assert 0 < accepted <= drafted
    told = [sum(answer["espalier"]["accepted_per_position"]) for answer in answers]
    assert sum(told) == accepted
    assert all(answer["espalier"]["steps"] + count == 40 for answer, count in zip(answers, told, strict=True))
