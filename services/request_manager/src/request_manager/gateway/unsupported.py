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
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
}

COMPLETIONS: Neutral = MappingProxyType(
    # logprobs 0 asks for the chosen token's log-probability, so it is not neutral here.
    {**_BOTH, "best_of": (1,), "echo": (False,), "logprobs": (), "suffix": ("",)}
)

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
        "logprobs": (False,),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),  # without tools there is nothing to call in parallel
        "prediction": (),
        "reasoning_effort": ("none",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
)

MESSAGE: Neutral = MappingProxyType({"audio": (), "function_call": (), "tool_calls": ([],), "refusal": ("",)})


def refuse_unsupported(body: Mapping[str, object], neutral: Neutral, prefix: str = "") -> None:
    """Raises InvalidRequest naming the first field of `body` that asks for what is not honoured yet."""
    for name, values in neutral.items():
        value = body.get(name)
        if value is not None and value not in values:
            raise InvalidRequest(f"{prefix}{name} is not supported yet", prefix + name, "unsupported_parameter")
