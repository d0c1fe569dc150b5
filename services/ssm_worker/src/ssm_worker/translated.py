"""A small model of another vocabulary than the LLM's, as one of the LLM's: it reads and proposes the LLM's tokens.

Knows forwards and a map of tokens; must not know where the map comes from. All that is held of requests, prefixes
too, is in the LLM's tokens; only the rows that a forward computes are translated.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssm_worker.vocabulary import TokenMap
from treecore.errors import ConfigError
from treecore.model.batch import ForwardBatch
from treecore.model.decoder import Decoder
from treecore.model.kv_pool import KvPool
from treecore.model.spec import ModelSpec


class TranslatedDecoder:
    """Forwards of `decoder`, whose trimmed head, if it has one, is in its own tokens, for the LLM of `llm_spec`.

    spec: the decoder's, with the LLM's vocabulary and ends. output_token_ids: int32 [K] ascending, the LLM's token of
    each column. Raises ConfigError if the head has none of them.
    """

    def __init__(self, decoder: Decoder, tokens: TokenMap, llm_spec: ModelSpec) -> None:
        self.spec = replace(decoder.spec, vocab_size=llm_spec.vocab_size, eos_token_ids=llm_spec.eos_token_ids)
        columns, is_head = _columns(decoder, tokens.ssm_twins)
        if not len(columns):
            raise ConfigError("the SSM's trimmed head has none of the tokens that it shares with the LLM")
        self.output_token_ids = tokens.llm_twins[is_head]
        self._decoder = decoder
        self._reads = torch.from_numpy(tokens.reads.astype(np.int64))
        self._columns = torch.from_numpy(columns).to(decoder.device)

    def new_pool(self, num_slots: int) -> KvPool:
        """See Decoder."""
        return self._decoder.new_pool(num_slots)

    def forward(self, batch: ForwardBatch, pool: KvPool) -> Tensor:
        """See Decoder; fp32 [num_logit_rows, K]."""
        logits = self._decoder.forward(replace(batch, tokens=self._reads[batch.tokens]), pool)
        return logits.index_select(1, self._columns)


def _columns(decoder: Decoder, tokens: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The columns of those of the decoder's `tokens` that its head has, and which of them those are."""
    head = decoder.output_token_ids
    if head is None:
        return tokens.astype(np.int64), np.ones(len(tokens), np.bool_)
    places = np.minimum(np.searchsorted(head, tokens), len(head) - 1)
    is_head = head[places] == tokens
    return places[is_head], is_head
