"""The fields of a request that change tokens, and the members of an answer that explain them, over HTTP."""

import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from jsonschema_rs import Draft202012Validator
from prometheus_client import CollectorRegistry

from request_manager.contract import Generation, ModelCard, TokenDelta, TokenLogprob
from request_manager.gateway.app import create_app
from request_manager.gateway.openapi import document
from request_manager.gateway.settings import GatewaySettings
from request_manager.gateway.testing import END, tiny_codec, tiny_tokenizer
from request_manager.testing import Line, ScriptedManager, deltas, made_up_logprob
from treecore.errors import InvalidRequest
from treecore.params import Grammar, SamplingParams

TOKENIZER = tiny_tokenizer()
CODEC = tiny_codec()
EOS = TOKENIZER.token_to_id(END)
CARD = ModelCard("tiny", TOKENIZER.get_vocab_size(), 64, (EOS,), 16)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [*TOKENIZER.encode("hello é😀").ids, EOS]
SCHEMAS = document(CARD, ())["components"]["schemas"]

Json = dict[str, Any]


class Checker:
    """Takes every grammar but those with the word `bad` in them; remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[Grammar] = []

    def check(self, grammar: Grammar) -> None:
        """As GrammarChecker."""
        self.seen.append(grammar)
        if "bad" in grammar.source:
            raise InvalidRequest("there is something bad in it", None, "bad_grammar")


def hello(generation: Generation) -> Iterable[Line]:
    """'hello é😀' in three steps, the second of which ends inside a character, then EOS."""
    return deltas(HELLO, [2, 2], "stop", generation.params.num_logprobs)


def client(manager: ScriptedManager, checker: Checker | None = None, **options: Any) -> httpx.AsyncClient:
    """A client of a gateway over this manager, in process."""
    app = create_app(manager, CODEC, GatewaySettings(**options), CollectorRegistry(), grammars=checker)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


def body_of(path: str, **fields: Any) -> Json:
    """A request to this endpoint."""
    prompt = {"prompt": "ab"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "ab"}]}
    return {"model": "tiny", "seed": 7, **prompt, **fields}


async def answer(path: str, script: Any = hello, **fields: Any) -> Json:
    """A whole answer, which is as the OpenAPI document says."""
    async with client(ScriptedManager(CARD, script)) as gateway:
        response = await gateway.post(path, json=body_of(path, **fields))
    assert response.status_code == 200, response.text
    check_schema("Completion" if path == COMPLETIONS else "ChatCompletion", response.json())
    return dict(response.json())


async def chunks(path: str, script: Any = hello, **fields: Any) -> list[Json]:
    """A streamed answer, each chunk of which is as the OpenAPI document says."""
    async with client(ScriptedManager(CARD, script)) as gateway:
        response = await gateway.post(path, json=body_of(path, **fields, stream=True))
    *lines, done, _ = response.text.split("\n\n")
    assert done == "data: [DONE]"
    told = [json.loads(line.removeprefix("data: ")) for line in lines]
    for chunk in told:
        check_schema("CompletionChunk" if path == COMPLETIONS else "ChatCompletionChunk", chunk)
    return told


def check_schema(name: str, value: Json) -> None:
    """Against a schema of the OpenAPI document."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": SCHEMAS}}
    Draft202012Validator(schema).validate(value)


async def params_of(
    path: str, checker: Checker | None = None, options: Json | None = None, **fields: Any
) -> SamplingParams:
    """What the manager is asked for."""
    manager = ScriptedManager(CARD, hello)
    async with client(manager, checker, **options or {}) as gateway:
        response = await gateway.post(path, json=body_of(path, **fields))
    assert response.status_code == 200, response.text
    (generation,) = manager.asked
    assert generation.params.prompt_len == len(generation.prompt)
    return generation.params


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_every_parameter_reaches_the_manager(path: str) -> None:
    """As numbers and token ids, under the names of the sampling parameters."""
    plain = {"min_p": 0.1, "presence_penalty": -1, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "min_tokens": 2}
    params = await params_of(path, **plain, logit_bias={"5": -100, "0": 1.5}, stop_token_ids=[3, EOS, 3])
    assert {name: getattr(params, name) for name in plain} == plain
    assert dict(zip(params.bias_ids, params.biases, strict=True)) == {5: -100.0, 0: 1.5}
    assert params.end_token_ids == (EOS, 3)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_defaults_are_neutral(path: str) -> None:
    """Null and absent are the same, and change nothing."""
    names = ("min_p", "logit_bias", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs", "response_format")
    params = await params_of(path, **dict.fromkeys(names))
    assert params == await params_of(path)
    expected = SamplingParams(1.0, 0, 1.0, params.seed, prompt_len=params.prompt_len, end_token_ids=(EOS,))
    assert params == expected


async def test_what_ends_the_output() -> None:
    """The model's EOS unless it is ignored, and the client's tokens."""
    assert (await params_of(COMPLETIONS, ignore_eos=True)).end_token_ids == ()
    assert (await params_of(COMPLETIONS, ignore_eos=True, stop_token_ids=[EOS, 1])).end_token_ids == (EOS, 1)


async def test_the_verification_rule() -> None:
    """The request's own, else the deployment's."""
    options = {"verification": "multi_step"}
    assert (await params_of(CHAT)).rule == "coupled"
    assert (await params_of(CHAT, options=options)).rule == "multi_step"
    assert (await params_of(CHAT, options=options, espalier={"verification": "naive"})).rule == "naive"


@pytest.mark.parametrize(
    ("path", "fields", "num_logprobs"),
    [
        (COMPLETIONS, {"logprobs": 0}, 0),
        (COMPLETIONS, {"logprobs": 20}, 20),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, None),
        (CHAT, {"logprobs": True}, 0),
        (CHAT, {"logprobs": True, "top_logprobs": 3}, 3),
    ],
)
async def test_logprobs_that_are_asked_for(path: str, fields: Json, num_logprobs: int | None) -> None:
    """Chat says whether and how many apart; completions say both at once."""
    assert (await params_of(path, **fields)).num_logprobs == num_logprobs


SCHEMA = {"type": "object", "properties": {"é": {"type": "string"}, "a": {}}}
GRAMMARS: list[tuple[Json, Grammar]] = [
    ({"response_format": {"type": "json_object"}}, Grammar("json_object", "")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        Grammar("json_schema", '{"type":"object","properties":{"é":{"type":"string"},"a":{}}}'),
    ),
    ({"guided_json": {}}, Grammar("json_schema", "{}")),
    ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"guided_choice": ["yes", "é"]}, Grammar("choice", '["yes","é"]')),
    ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
]


@pytest.mark.parametrize(("fields", "grammar"), GRAMMARS)
async def test_grammars(fields: Json, grammar: Grammar) -> None:
    """Each way to ask for a structure, checked before anything is generated."""
    checker = Checker()
    assert (await params_of(CHAT, checker, **fields)).grammar == grammar
    assert checker.seen == [grammar]


@pytest.mark.parametrize(
    ("fields", "param"), [({"guided_regex": "bad"}, "guided_regex"), ({"guided_json": {"bad": 1}}, "guided_json")]
)
async def test_a_grammar_that_cannot_be_followed(fields: Json, param: str) -> None:
    """400 that names the field and says what is wrong with it."""
    manager = ScriptedManager(CARD, hello)
    async with client(manager, Checker()) as gateway:
        response = await gateway.post(COMPLETIONS, json=body_of(COMPLETIONS, **fields))
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "bad_grammar")
    assert error["message"] == f"{param}: there is something bad in it"
    assert manager.asked == []


async def test_chat_logprobs() -> None:
    """An entry for each token that counts, in order, with the alternatives; bytes put characters together."""
    body = await answer(CHAT, logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    assert [entry["logprob"] for entry in content] == [made_up_logprob(token, 2).logprob for token in HELLO]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "hello é😀" + END
    assert content[0]["token"] == "hello"
    first = made_up_logprob(HELLO[0], 2).top
    assert [other["logprob"] for other in content[0]["top_logprobs"]] == [logprob for _, logprob in first]


async def test_completion_logprobs() -> None:
    """OpenAI's older object: four lists as long as the tokens, the chosen one among the alternatives."""
    body = await answer(COMPLETIONS, logprobs=1)
    told = body["choices"][0]["logprobs"]
    assert {len(values) for values in told.values()} == {len(HELLO)}
    assert told["tokens"][:4] == ["hello", " ", "é", "bytes:\\xf0\\x9f"]
    assert told["text_offset"] == [0, 5, 6, *[7] * (len(HELLO) - 4), 8]
    for token, logprob, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert top == {token: logprob}


async def test_the_chosen_token_is_among_the_alternatives() -> None:
    """One that was not among the best is one more; of two tokens with one text the chosen one counts."""
    logprob = TokenLogprob(-5.0, ((2, -1.0), (3, -2.0), (-1, -3.0), (-2, -4.0)))
    body = await answer(COMPLETIONS, lambda _: [TokenDelta((1,), "length", 1, 0, (logprob,))], logprobs=4)
    (top,) = body["choices"][0]["logprobs"]["top_logprobs"]
    spelled = [CODEC.spell(token).decode() for token in (2, 3, 1)]
    assert list(top.items()) == [(spelled[0], -1.0), (spelled[1], -2.0), ("", -3.0), (spelled[2], -5.0)]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_impossible_tokens_are_json(path: str) -> None:
    """-inf as OpenAI writes it."""
    logprob = TokenLogprob(float("-inf"), ((1, float("-inf")),))
    script = [TokenDelta((1,), "length", 1, 0, (logprob,))]
    fields = {"logprobs": 1} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 1}
    assert json.dumps(await answer(path, lambda _: script, **fields)).count("-9999.0") == 2


@pytest.mark.parametrize(
    ("path", "fields"), [(COMPLETIONS, {"logprobs": 2}), (CHAT, {"logprobs": True, "top_logprobs": 2})]
)
@pytest.mark.parametrize("stop", [None, "o ", "\u00e9", "\U0001f600"])
async def test_streamed_logprobs_are_the_whole_ones(path: str, fields: Json, stop: str | None) -> None:
    """Cases 9, 19: each entry once, in order, none behind a stop string, whatever text is held back."""
    whole = (await answer(path, **fields, stop=stop))["choices"][0]
    told = [choice for chunk in await chunks(path, **fields, stop=stop) for choice in chunk["choices"]]
    streamed = [choice["logprobs"] for choice in told if choice["logprobs"] is not None]
    for name, values in whole["logprobs"].items():
        if values is not None:
            assert [value for part in streamed for value in part[name]] == values
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in told)
    assert text == (whole["text"] if path == COMPLETIONS else whole["message"]["content"])


async def test_usage_and_acceptance_are_cut_with_the_text() -> None:
    """Cases 7, 9, 10: one step of many accepted tokens, a stop string in the middle, max_tokens reached: all agree."""
    tokens = TOKENIZER.encode("ab STOP tail").ids
    kept = len(TOKENIZER.encode("ab STOP").ids)
    limited = [TokenDelta(tuple(tokens), "length", 1, len(tokens) - 1)]
    body = await answer(
        COMPLETIONS, lambda _: limited, stop="STOP", max_tokens=len(tokens), espalier={"return_token_ids": True}
    )
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab ", "stop")
    del body["usage"]["prompt_tokens_details"]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": kept, "total_tokens": 2 + kept}
    assert body["espalier"] == {
        "seed": 7,
        "steps": 1,
        "tokens_per_step": kept,
        "accepted_per_position": [1] * kept,
        "token_ids": [tokens[:kept]],
    }


async def test_cached_tokens_are_those_that_no_choice_computed() -> None:
    """Two prompts, two choices each: the least of each prompt's choices, added up."""
    found = iter([4, 2, 3, 5])
    body = await answer(
        COMPLETIONS,
        lambda _: [TokenDelta(tuple(HELLO), "length", 1, num_found=next(found))],
        prompt=["ab cd ef", "gh ij kl"],
        n=2,
    )
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2 + 3}


async def test_fewer_tokens_than_asked_for() -> None:
    """Case 10: usage counts what is there, not max_tokens."""
    body = await answer(CHAT, max_tokens=30)
    assert body["usage"]["completion_tokens"] == len(HELLO) < 30


async def test_nothing_behind_an_accepted_eos() -> None:
    """Case 8: the manager's last delta ends in EOS, in mid-run: it is counted, and no text."""
    body = await answer(CHAT, lambda _: [TokenDelta((*TOKENIZER.encode("ab").ids, EOS), "stop", 1, 3)])
    assert body["choices"][0]["message"]["content"] == "ab"
    assert body["usage"]["completion_tokens"] == 3
    assert body["espalier"]["accepted_per_position"] == [1, 1, 1]


@pytest.mark.parametrize("prompt", ["a \u00e9", TOKENIZER.encode("a \u00e9").ids])
@pytest.mark.parametrize("stop", [None, "a"])
async def test_echo(prompt: str | list[int], stop: str | None) -> None:
    """The prompt's text in front of each choice, streamed or not; stop strings are looked for behind it."""
    fields = {"prompt": prompt, "echo": True, "n": 2, "stop": stop}
    whole = await answer(COMPLETIONS, **fields)
    assert [choice["text"] for choice in whole["choices"]] == ["a éhello é😀"] * 2
    told = [choice for chunk in await chunks(COMPLETIONS, **fields) for choice in chunk["choices"]]
    for idx in range(2):
        assert "".join(choice["text"] for choice in told if choice["index"] == idx) == "a éhello é😀"


async def test_echo_of_several_prompts() -> None:
    """Each choice begins with its own prompt."""
    body = await answer(COMPLETIONS, prompt=["a", "bc"], echo=True, n=2)
    assert [choice["text"].removesuffix("hello é😀") for choice in body["choices"]] == ["a", "a", "bc", "bc"]
