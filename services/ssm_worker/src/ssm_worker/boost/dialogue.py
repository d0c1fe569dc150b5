"""How a dialogue is written, token by token: the plan of it and its state. Knows token ids; nothing of models or files.

An instruct model that is given its chat template up to the user's words writes a user's words itself. The variety of
prompts matters most to the student, so many dialogues begin with the first words of some kind of request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ssm_worker.boost.turns import TokenIds, Turns
from treecore.noise import Seed
from treecore.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Answers:
    """How answers are drawn: the share of greedy ones, the temperatures of the others, at most `max_len` tokens."""

    greedy: float = 1.0
    temperatures: tuple[float, ...] = (0.6, 0.8, 1.0)
    max_len: int = 128

    def temperature(self, rng: np.random.Generator) -> float:
        """That of one answer, 0 for a greedy one."""
        return 0.0 if rng.random() < self.greedy else float(rng.choice(self.temperatures))


@dataclass(frozen=True, slots=True)
class Mixture:
    """What dialogues are made of: shares in [0, 1], lengths in tokens. Prompts are always sampled at temperature 1."""

    with_system_prompt: float = 0.8
    with_opener: float = 0.6
    max_prompt_len: int = 110
    answers: Answers = Answers(greedy=0.55, max_len=140)

    def row_len(self, turns: Turns, openers: Sequence[TokenIds]) -> int:
        """Tokens of the longest dialogue that can come of it."""
        longest_prompt = max(self.max_prompt_len, *(len(opener) for opener in openers))
        opening = max(len(turns.opening), len(turns.bare_opening))
        return opening + longest_prompt + len(turns.close) + self.answers.max_len


@dataclass(frozen=True, slots=True)
class Plan:
    """What is fixed before dialogue `index` is written; with the teacher it determines every token.

    forced: the tokens that it begins with. start: how many of them are the template's opening. writes_prompt: whether
    the teacher goes on with the user's words, or `forced` reaches up to the answer. max_prompt_len counts an opener.
    """

    index: int
    forced: TokenIds
    start: int
    writes_prompt: bool
    temperature: float
    seed: Seed
    max_prompt_len: int
    max_answer_len: int


def plan_dialogue(index: int, seed: int, turns: Turns, openers: Sequence[TokenIds], mixture: Mixture) -> Plan:
    """Dialogue `index` of the endless series that belongs to `seed`."""
    rng = np.random.default_rng([seed, index])
    opening = turns.opening if rng.random() < mixture.with_system_prompt else turns.bare_opening
    opener = openers[int(rng.integers(len(openers)))] if rng.random() < mixture.with_opener else ()
    return Plan(
        index=index,
        forced=opening + opener,
        start=len(opening),
        writes_prompt=True,
        temperature=mixture.answers.temperature(rng),
        seed=Seed(int(rng.integers(2**63))),
        max_prompt_len=mixture.max_prompt_len,
        max_answer_len=mixture.answers.max_len,
    )


def plan_answer(index: int, prompt: TokenIds, seed: int, turns: Turns, answers: Answers) -> Plan:
    """An answer to a given prompt; the template and the prompt count as the opening."""
    rng = np.random.default_rng([seed, index])
    forced = turns.opening + prompt + turns.close
    return Plan(
        index=index,
        forced=forced,
        start=len(forced),
        writes_prompt=False,
        temperature=answers.temperature(rng),
        seed=Seed(int(rng.integers(2**63))),
        max_prompt_len=0,
        max_answer_len=answers.max_len,
    )


class Dialogue:
    """A dialogue while it is written. Owns `tokens`, of which the first `num_fed` were given to the teacher."""

    def __init__(self, plan: Plan, turns: Turns) -> None:
        self.plan = plan
        self.tokens = list(plan.forced)
        self.num_fed = 0
        self._turns = turns
        self._in_prompt = plan.writes_prompt
        self._turn_len = len(plan.forced) - plan.start

    def next_chunk(self) -> list[int]:
        """What the teacher reads next: the template's opening at once, then one token at a time."""
        first = self.num_fed
        return self.tokens[first : max(first + 1, self.plan.start)]

    def params(self) -> SamplingParams:
        """How the token after the fed ones is drawn."""
        temperature = 1.0 if self._in_prompt else self.plan.temperature
        return SamplingParams(temperature, 0, 1.0, self.plan.seed)

    @property
    def wants_token(self) -> bool:
        """Whether the next token is the teacher's to choose, once the next chunk is fed."""
        return self.num_fed + len(self.next_chunk()) == len(self.tokens)

    def feed(self, sampled: int | None) -> bool:
        """The teacher has read the next chunk; it chose `sampled` if that was wanted. Returns whether it is over."""
        self.num_fed += len(self.next_chunk())
        if sampled is None:
            return False
        return self._extend_prompt(sampled) if self._in_prompt else self._extend_answer(sampled)

    def _extend_prompt(self, sampled: int) -> bool:
        if self._turn_len >= self.plan.max_prompt_len or sampled in self._turns.special:
            self.tokens += self._turns.close
            self._in_prompt, self._turn_len = False, 0
        else:
            self._append(sampled)
        return False

    def _extend_answer(self, sampled: int) -> bool:
        ended = self._turn_len > 0 and self.tokens[-1] == self._turns.end
        if ended or self._turn_len >= self.plan.max_answer_len:
            return True
        self._append(self._turns.end if sampled in self._turns.special else sampled)
        return False

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self._turn_len += 1
