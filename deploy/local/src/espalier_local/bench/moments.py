"""Positions of text with two models' logits behind them: what an SSM would draft from, and what the LLM says."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from espalier_local.system import SystemConfig
from treecore.law import Distribution, processed
from treecore.messages import RequestId, VerifyItem
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.sampling import best_tokens
from treecore.sparse import Ids

if TYPE_CHECKING:
    from treecore.model.held import HeldRequests

_BLOCK_LEN = 16
_MAX_PROMPT_LEN = 256
_BLOCKS = 128  # of the cache for each prompt and its text
_SYNTHETIC_VOCAB = 1000
_SYNTHETIC_SPREAD = 0.8  # of the noise on the LLM's logits that makes its SSM: a total variation of about 0.24
_NOTHING = np.empty(0, np.int32)

Row = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Moment:
    """One position of a text: the tokens so far, and both models' logits behind them. token_ids: of the SSM's head."""

    committed: tuple[int, ...]
    llm: Row
    ssm: Row
    token_ids: Ids | None

    def total_variation(self, params: SamplingParams) -> float:
        """Between both laws, as they are sampled: 0 (equal) to 1."""
        vocab = len(self.llm)
        p = _dense(processed(self.llm, None, params), vocab)
        q = _dense(processed(self.ssm, self.token_ids, params), vocab)
        return float(np.abs(p - q).sum() / 2)


def synthetic_moments(count: int) -> Iterator[Moment]:
    """Random laws, and SSMs whose logits are the LLM's with noise."""
    rng = np.random.default_rng(0)
    for idx in range(count):
        llm = (4.0 * rng.standard_normal(_SYNTHETIC_VOCAB)).astype(np.float32)
        ssm = llm + (_SYNTHETIC_SPREAD * rng.standard_normal(_SYNTHETIC_VOCAB)).astype(np.float32)
        yield Moment((idx % _SYNTHETIC_VOCAB,), llm, ssm, None)


class Reader:
    """Both models behind the same growing texts."""

    def __init__(
        self, llm: "HeldRequests", ssm: "HeldRequests", prompts: Sequence[Sequence[int]], token_ids: Ids | None
    ) -> None:
        self._llm = llm
        self._ssm = ssm
        self._prompts = prompts
        self._token_ids = token_ids

    def moments(self, temperature: float, num_tokens: int) -> Iterator[Moment]:
        """`num_tokens` positions behind each prompt, on text that the LLM samples at `temperature`."""
        texts = [list(prompt) for prompt in self._prompts]
        starts, session = [0] * len(texts), f"T {temperature}"
        for _ in tqdm(range(num_tokens), unit="step", desc=f"T {temperature}", leave=False, disable=None):
            rows = [self._behind(held, session, texts, starts) for held in (self._llm, self._ssm)]
            starts = [len(text) for text in texts]
            for idx, (text, llm, ssm) in enumerate(zip(texts, *rows, strict=True)):
                yield Moment(tuple(text), llm, ssm, self._token_ids)
                params = SamplingParams(temperature, 0, 1.0, Seed(2**32 + idx))
                text.append(int(best_tokens(llm, None, params, len(text))[0]))

    def _behind(
        self, held: "HeldRequests", session: str, texts: Sequence[list[int]], starts: Sequence[int]
    ) -> list[Row]:
        """Logits behind each text, whose tokens before `starts` are held."""
        held.begin_step(session, ())
        ids = [RequestId(f"r{idx}") for idx in range(len(texts))]
        for request_id, text, start in zip(ids, texts, starts, strict=True):
            params = SamplingParams(0.0, 0, 1.0, Seed(0)) if start == 0 else None
            tokens = np.array(text[start:], np.int32)
            refused = held.take(VerifyItem(request_id, 0, start, tokens, params, _NOTHING, _NOTHING, True))
            assert refused is None, refused
        return [rows[-1] for rows in held.compute(ids)]


def open_reader(config: SystemConfig, prompts: Sequence[str]) -> Reader:
    """A reader of `prompts` with the system's LLM and its first SSM."""
    import torch  # noqa: PLC0415 - seconds that no other command should pay
    from tokenizers import Tokenizer  # noqa: PLC0415

    from treecore.model.held import HeldRequests  # noqa: PLC0415
    from treecore.model.load import load_decoder  # noqa: PLC0415

    torch.set_num_threads(config.threads)
    teacher = config.model.directory
    llm = load_decoder(teacher, dtype=config.dtype)
    ssm = load_decoder(config.ssms[0].directory, dtype=config.dtype, embedding_from=teacher)
    tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    ids = [tokenizer.encode(prompt).ids[:_MAX_PROMPT_LEN] for prompt in prompts]
    llm_held, ssm_held = (HeldRequests(decoder, len(prompts) * _BLOCKS, _BLOCK_LEN) for decoder in (llm, ssm))
    return Reader(llm_held, ssm_held, ids, ssm.output_token_ids)


def _dense(law: Distribution, vocab: int) -> NDArray[np.float64]:
    p = np.zeros(vocab)
    p[law.token_ids] = np.exp(law.logp.astype(np.float64) - law.logp.max())
    p /= p.sum()
    return p
