"""A tiny byte-level tokenizer with every trap that a big one has. Ships with the library for tests of text.

Knows tokenizers only.
"""

import jinja2
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from request_manager.gateway.text import TextCodec, compile_template

START, END = "<|start|>", "<|end|>"
SPACED = "<two words>"

# In the byte alphabet: é is Ã©, 😀 is ðŁĺĢ. So one token ends inside é and one holds half of 😀.
_WORDS = ("hello", "Ġwo", "Ã©", "oÃ", "ðŁ")

_TEMPLATE = """{% for message in messages %}
{% if message.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}
<|start|>{{ message.role }}
{{ message.content }}<|end|>
{% endfor %}
{% if add_generation_prompt %}<|start|>assistant
{% endif %}"""


def tiny_tokenizer() -> Tokenizer:
    """All 256 bytes, a few merges (one ends inside a character), two special tokens, an added one with a space."""
    vocab = {char: id_ for id_, char in enumerate(sorted(ByteLevel.alphabet()))}
    merges = [merge for word in _WORDS for merge in _merges_into(word, vocab)]
    tokenizer = Tokenizer(BPE(vocab, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(SPACED, special=False)])
    return tokenizer


def tiny_codec() -> TextCodec:
    """The tiny tokenizer with a chat template that wants a system message first."""
    return TextCodec(tiny_tokenizer(), tiny_template())


def tiny_template() -> jinja2.Template:
    """Turns as <|start|>role, text, <|end|>."""
    return compile_template(_TEMPLATE, {})


def _merges_into(word: str, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Adds `word` and its prefixes to the vocabulary; returns the merges that build it from the left."""
    merges = []
    for end in range(2, len(word) + 1):
        if word[:end] not in vocab:
            vocab[word[:end]] = len(vocab)
            merges.append((word[: end - 1], word[end - 1]))
    return merges
