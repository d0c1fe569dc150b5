"""Fields of the OpenAI (and common server) APIs that are not honoured yet: their neutral values, and nothing else.

A neutral value changes nothing, so it is accepted; any other value would be silently wrong, so it is refused.
"""

from collections.abc import Mapping
from types import MappingProxyType

from treecore.errors import InvalidRequest

Neutral = Mapping[str, tuple[object, ...]]

_BOTH: Neutral = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
}

COMPLETIONS: Neutral = MappingProxyType({**_BOTH, "best_of": (1,), "suffix": ("",)})

CHAT: Neutral = MappingProxyType(
    {
        **_BOTH,
        "add_generation_prompt": (True,),
        "audio": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),  # without tools there is nothing to call in parallel
        "prediction": (),
        "reasoning_effort": ("none",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
)

MESSAGE: Neutral = MappingProxyType({"audio": (), "function_call": (), "tool_calls": ([],), "refusal": ("",)})


def refuse_unsupported(body: Mapping[str, object], neutral: Neutral, prefix: str = "") -> None:
    """Raises InvalidRequest naming the first field of `body` that asks for what is not honoured yet."""
    for name, values in neutral.items():
        value = body.get(name)
        if value is not None and not any(_is_same(value, other) for other in values):
            raise InvalidRequest(f"{prefix}{name} is not supported yet", prefix + name, "unsupported_parameter")


def _is_same(value: object, other: object) -> bool:
    """Equal as JSON values: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
