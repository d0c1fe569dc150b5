"""transformers' `generate` on the same checkpoint: the independent oracle of identity and the peer in speed."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treecore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """Greedy tokens, EOS included, and the mean time of a token after the first."""

    token_ids: tuple[int, ...]
    ms_per_token: float


class TransformersPeer:
    """Greedy decoding by transformers; raises ConfigError where it is not installed."""

    def __init__(self, model_dir: Path, dtype: str, threads: int) -> None:
        try:
            import transformers  # noqa: PLC0415 - an optional peer, slow to import
        except ImportError as error:
            raise ConfigError("transformers is not installed: pip install 'espalier[peers]'") from error
        import torch  # noqa: PLC0415

        torch.set_num_threads(threads)
        self._torch = torch
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_dir)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
        self._model = model.eval()

    def encode_chat(self, prompt: str) -> list[int]:
        """The prompt's tokens behind the model's chat template."""
        turns = [{"role": "user", "content": prompt}]
        text = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def generate(self, prompt: str, max_tokens: int) -> PeerAnswer:
        """The greedy answer to a user's message."""
        prompt_ids = self.encode_chat(prompt)
        self._generate(prompt_ids, 1)
        started = time.perf_counter()
        self._generate(prompt_ids, 1)
        first = time.perf_counter()
        token_ids = self._generate(prompt_ids, max_tokens)
        ended = time.perf_counter()
        decode_s = (ended - first) - (first - started)
        return PeerAnswer(token_ids, 1e3 * decode_s / max(len(token_ids) - 1, 1))

    def _generate(self, prompt_ids: list[int], max_tokens: int) -> tuple[int, ...]:
        ids = self._torch.tensor([prompt_ids])
        out = self._model.generate(
            ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
        )
        return tuple(out[0, len(prompt_ids) :].tolist())
