"""A checked request and its prompts become generations: everything that needs the model's card is validated here.

Must not know HTTP, text or response shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from request_manager.contract import Generation, ModelCard
from request_manager.gateway.schema import GenerationRequest
from treecore.errors import InvalidRequest
from treecore.expand import Expansion, expansion
from treecore.messages import RequestId
from treecore.noise import Seed, choice_seed
from treecore.sampling import SamplingParams

_MAX_ECHO = 200  # characters of a wrong value that an error repeats


@dataclass(frozen=True, slots=True)
class Job:
    """One request, admitted. generations: choice prompt_idx * n + i is the i-th of its prompt.

    model: as the client named it. created: Unix seconds. prompt_len: tokens of all prompts, each counted once.
    """

    request_id: str
    model: str
    created: int
    seed: Seed
    generations: tuple[Generation, ...]
    prompt_len: int
    stops: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    shows_token_ids: bool
    shows_usage_chunk: bool


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a request gets on arrival: its id and Unix time; `draw_seed` is asked if the client gave no seed."""

    request_id: str
    created: int
    draw_seed: Callable[[], int]


def check_model(model: str, card: ModelCard, aliases: Sequence[str]) -> None:
    """Raises InvalidRequest if `model` is neither the model's name nor an alias of it."""
    if model != card.name and model not in aliases:
        raise InvalidRequest(
            f"the model {model[:_MAX_ECHO]!r} does not exist; this server has {card.name!r}", "model", "model_not_found"
        )


def admit(
    fields: GenerationRequest, prompts: Sequence[Sequence[int]], param: str, card: ModelCard, arrival: Arrival
) -> Job:
    """The job for `prompts`. param: the field that the prompts came in. Raises InvalidRequest naming the field."""
    for prompt in prompts:
        _check_prompt(prompt, param, card)
    seed = Seed((arrival.draw_seed() if fields.seed is None else fields.seed) % 2**64)
    return Job(
        request_id=arrival.request_id,
        model=fields.model,
        created=arrival.created,
        seed=seed,
        generations=_generations(fields, prompts, seed, card, arrival.request_id),
        prompt_len=sum(len(prompt) for prompt in prompts),
        stops=tuple(fields.stop),
        eos_token_ids=card.eos_token_ids,
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
    if not all(0 <= token < card.vocab_size for token in prompt):
        raise InvalidRequest(f"token ids must be in [0, {card.vocab_size})", param)


def _generations(
    fields: GenerationRequest, prompts: Sequence[Sequence[int]], seed: Seed, card: ModelCard, request_id: str
) -> tuple[Generation, ...]:
    tree = _tree(fields, card)
    choices = [prompt for prompt in prompts for _ in range(fields.n)]
    return tuple(
        Generation(
            request_id=RequestId(f"{request_id}-{idx}"),
            prompt=np.array(prompt, np.int32),
            params=_params(fields, choice_seed(seed, idx), card),
            max_tokens=_max_tokens(fields, len(prompt), card),
            speculation=fields.espalier.speculation is not False,
            tree=tree,
        )
        for idx, prompt in enumerate(choices)
    )


def _tree(fields: GenerationRequest, card: ModelCard) -> Expansion | None:
    widths = fields.espalier.tree
    return None if widths is None else expansion(widths, card.max_tree_nodes)


def _params(fields: GenerationRequest, seed: Seed, card: ModelCard) -> SamplingParams:
    return SamplingParams(
        temperature=fields.temperature,
        top_k=min(fields.top_k, card.vocab_size),
        top_p=fields.top_p,
        seed=seed,
    )


def _max_tokens(fields: GenerationRequest, prompt_len: int, card: ModelCard) -> int:
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
