"""A checked request and its prompts become generations: everything that needs the model's card is validated here.

Must not know HTTP, text or response shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from request_manager.contract import Generation, ModelCard
from request_manager.gateway.schema import GenerationRequest
from treecore.errors import InvalidRequest
from treecore.expand import Expansion, expansion
from treecore.messages import RequestId
from treecore.noise import Seed, choice_seed
from treecore.params import Grammar, Rule, SamplingParams

_MAX_ECHO = 200  # characters of a wrong value that an error repeats


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt's token ids, and the text that answers to it begin with."""

    tokens: Sequence[int]
    echo: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """One request, admitted. generations: choice prompt_idx * n + i is the i-th of its prompt. echoes: one a choice.

    model: as the client named it. created: Unix seconds. prompt_len: tokens of all prompts, each counted once.
    """

    request_id: str
    model: str
    created: int
    seed: Seed
    generations: tuple[Generation, ...]
    num_prompts: int
    prompt_len: int
    stops: tuple[str, ...]
    echoes: tuple[str, ...]
    shows_token_ids: bool
    shows_usage_chunk: bool


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a request gets on arrival: its id and Unix time; `draw_seed` is asked if the client gave no seed.

    rule: the deployment's, if the client names none. grammar: the one that the request asks for, checked.
    """

    request_id: str
    created: int
    draw_seed: Callable[[], int]
    rule: Rule = "coupled"
    grammar: Grammar | None = None


def check_model(model: str, card: ModelCard, aliases: Sequence[str]) -> None:
    """Raises InvalidRequest if `model` is neither the model's name nor an alias of it."""
    if model != card.name and model not in aliases:
        raise InvalidRequest(
            f"the model {model[:_MAX_ECHO]!r} does not exist; this server has {card.name!r}", "model", "model_not_found"
        )


def admit(
    fields: GenerationRequest, prompts: Sequence[EncodedPrompt], param: str, card: ModelCard, arrival: Arrival
) -> Job:
    """The job for `prompts`. param: the field that the prompts came in. Raises InvalidRequest naming the field."""
    for prompt in prompts:
        _check_prompt(prompt.tokens, param, card)
    seed = Seed((arrival.draw_seed() if fields.seed is None else fields.seed) % 2**64)
    return Job(
        request_id=arrival.request_id,
        model=fields.model,
        created=arrival.created,
        seed=seed,
        generations=_generations(fields, prompts, _params(fields, seed, card, arrival), card, arrival.request_id),
        num_prompts=len(prompts),
        prompt_len=sum(len(prompt.tokens) for prompt in prompts),
        stops=tuple(fields.stop),
        echoes=tuple(prompt.echo for prompt in prompts for _ in range(fields.n)),
        shows_token_ids=bool(fields.espalier.return_token_ids),
        shows_usage_chunk=fields.wants_usage_chunk,
    )


def check_num_choices(fields: GenerationRequest, num_prompts: int, max_choices: int) -> None:
    """Raises InvalidRequest if prompts times n is more than one request may ask for."""
    if num_prompts * fields.n > max_choices:
        raise InvalidRequest(
            f"{num_prompts} prompts with n {fields.n}; at most {max_choices} choices a request",
            "n" if num_prompts == 1 else "prompt",
        )


def _check_prompt(prompt: Sequence[int], param: str, card: ModelCard) -> None:
    if not prompt:
        raise InvalidRequest("a prompt must have at least one token", param)
    if len(prompt) >= card.context_len:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens; the model's context of {card.context_len} must also hold the answer",
            param,
            "context_length_exceeded",
        )
    _check_ids(prompt, param, card)


def _check_ids(tokens: Sequence[int], param: str, card: ModelCard) -> None:
    if not all(0 <= token < card.vocab_size for token in tokens):
        raise InvalidRequest(f"{param}: token ids must be in [0, {card.vocab_size})", param)


def _generations(
    fields: GenerationRequest,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    card: ModelCard,
    request_id: str,
) -> tuple[Generation, ...]:
    """params: the request's own; each choice derives its seed from the one in there."""
    own, tree = fields.espalier, _tree(fields, card)
    choices = [prompt.tokens for prompt in prompts for _ in range(fields.n)]
    return tuple(
        Generation(
            request_id=RequestId(f"{request_id}-{idx}"),
            prompt=np.array(prompt, np.int32),
            params=replace(params, seed=choice_seed(params.seed, idx), prompt_len=len(prompt)),
            max_tokens=_max_tokens(fields, len(prompt), card),
            speculation=own.speculation is not False and own.ssms != [],
            tree=tree,
            draft_ahead=own.draft_ahead,
            ssms=None if own.ssms is None else frozenset(own.ssms),
        )
        for idx, prompt in enumerate(choices)
    )


def _tree(fields: GenerationRequest, card: ModelCard) -> Expansion | Literal["dynamic"] | None:
    tree = fields.espalier.tree
    return expansion(tree, card.max_tree_nodes) if isinstance(tree, list) else tree


def _params(fields: GenerationRequest, seed: Seed, card: ModelCard, arrival: Arrival) -> SamplingParams:
    bias_ids = tuple(map(int, fields.logit_bias))
    _check_ids(bias_ids, "logit_bias", card)
    _check_ids(fields.stop_token_ids, "stop_token_ids", card)
    return SamplingParams(
        temperature=fields.temperature,
        top_k=min(fields.top_k, card.vocab_size),
        top_p=fields.top_p,
        seed=seed,
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        bias_ids=bias_ids,
        biases=tuple(fields.logit_bias.values()),
        min_tokens=fields.min_tokens,
        end_token_ids=_end_token_ids(fields, card, arrival.grammar),
        num_logprobs=fields.num_logprobs,
        grammar=arrival.grammar,
        rule=fields.espalier.verification or arrival.rule,
    )


def _end_token_ids(fields: GenerationRequest, card: ModelCard, grammar: Grammar | None) -> tuple[int, ...]:
    """The model's, unless the client ignores them, then the client's own; each once.

    A grammar's end is an end whatever the client ignores: behind it no token could follow.
    """
    eos_token_ids = () if fields.ignore_eos and grammar is None else card.eos_token_ids
    return tuple(dict.fromkeys((*eos_token_ids, *fields.stop_token_ids)))


def _max_tokens(fields: GenerationRequest, prompt_len: int, card: ModelCard) -> int:
    """The limit of one choice. Raises InvalidRequest if it leaves no room for min_tokens."""
    limit = _limit(fields, prompt_len, card)
    if fields.min_tokens > limit:
        raise InvalidRequest(f"min_tokens: {fields.min_tokens} are more than the limit of {limit}", "min_tokens")
    return limit


def _limit(fields: GenerationRequest, prompt_len: int, card: ModelCard) -> int:
    """What the client asked for, refused if there is no room; else the endpoint's default, cut to the room."""
    room = card.context_len - prompt_len
    if fields.asked_tokens is None:
        return room if fields.default_tokens is None else min(fields.default_tokens, room)
    param, asked = fields.asked_tokens
    if asked > room:
        raise InvalidRequest(
            f"{prompt_len} prompt tokens and {asked} more exceed the model's context of {card.context_len}", param
        )
    return asked
