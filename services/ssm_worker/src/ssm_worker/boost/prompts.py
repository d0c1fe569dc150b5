"""Prompts out of templates and subjects, so that no data set is needed. Knows text; must not know tokens or models.

A template's {kind} becomes a subject of that kind, {n} a number, {text} a passage. Which prompt has which number is a
function of the seed: more prompts of a seed begin with the fewer.
"""

import importlib.resources
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from treecore.errors import ConfigError

MIN_PASSAGE_LEN, MAX_PASSAGE_LEN = 200, 700  # characters; up to a fifth of a prompt's tokens are the request itself
_LOWER_SHARE, _BARE_SHARE = 0.08, 0.06  # prompts as people type them: all lower case; without the last mark
_MAX_FAILURES = 1000  # prompts in a row that were there before: the source is as good as exhausted
_SLOT = re.compile(r"\{(\w+)\}")

Subjects = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class PromptSource:
    """What prompts are made of. passages: texts of at least MIN_PASSAGE_LEN characters; each {text} is cut from one."""

    templates: Sequence[str]
    subjects: Subjects
    passages: Sequence[str]


def shipped_source(texts: Sequence[str] = ()) -> PromptSource:
    """The templates and subjects of this package; those that need a passage only where one of `texts` will do."""
    templates, subjects = read_templates(_read("prompt_templates.txt")), read_subjects(_read("prompt_subjects.txt"))
    passages = [text for text in texts if len(text) >= MIN_PASSAGE_LEN]
    usable = [template for template in templates if passages or "{text}" not in template]
    return PromptSource(usable, subjects, passages)


def read_templates(text: str) -> list[str]:
    """One a line; a backslash-n is a line break, a # begins a comment line."""
    return [line.replace("\\n", "\n") for line in _lines(text)]


def read_subjects(text: str) -> Subjects:
    """By kind: the lines below each [kind]."""
    subjects: dict[str, list[str]] = {}
    for line in _lines(text):
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            kind = subjects.setdefault(heading[1], [])
        else:
            kind.append(line)
    return subjects


def distinct_prompts(source: PromptSource, count: int, seed: int) -> Iterator[str]:
    """`count` different prompts. Raises ConfigError where the source has hardly any more."""
    seen: set[str] = set()
    index = last_new = 0
    while len(seen) < count:
        prompt = make_prompt(source, random.Random(f"{seed}/{index}"))
        index += 1
        if prompt not in seen:
            seen.add(prompt)
            last_new = index
            yield prompt
        elif index - last_new > _MAX_FAILURES:
            raise ConfigError(f"--count {count}: the templates gave {len(seen)} different prompts and hardly have more")


def make_prompt(source: PromptSource, rng: random.Random) -> str:
    """One prompt by lot."""
    template = rng.choice(source.templates)
    prompt = _SLOT.sub(lambda slot: _fill(slot[1], source, rng), template)
    style = rng.random()
    if style < _LOWER_SHARE:
        return prompt.lower()
    return prompt.rstrip(".?") if style < _LOWER_SHARE + _BARE_SHARE else prompt


def _fill(kind: str, source: PromptSource, rng: random.Random) -> str:
    if kind == "n":
        return str(rng.randint(*rng.choice([(2, 12), (2, 60), (5, 500)])))
    return _cut(source.passages, rng) if kind == "text" else rng.choice(source.subjects[kind])


def _cut(passages: Sequence[str], rng: random.Random) -> str:
    """The beginning of a passage, up to the end of a sentence if one ends there."""
    text = rng.choice(passages)[: rng.randint(MIN_PASSAGE_LEN, MAX_PASSAGE_LEN)]
    end = max(text.rfind(". "), text.rfind(".\n"))
    return text[: end + 1] if end > MIN_PASSAGE_LEN // 2 else text


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def _read(name: str) -> str:
    return (importlib.resources.files("ssm_worker.boost") / name).read_text(encoding="utf-8")
