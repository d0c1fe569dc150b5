"""The SSM worker process with a small model: loads it, announces itself, answers DraftRequests."""

import asyncio
import logging
import secrets
from dataclasses import replace

from ssm_worker.grow import Grower
from ssm_worker.settings import SsmSettings
from ssm_worker.translated import TranslatedDecoder
from ssm_worker.vocabulary import Model, token_map
from treecore.errors import ConfigError
from treecore.grammar import grammar_starter
from treecore.messages import Announcement, DraftRequest, WorkerId
from treecore.model.backend import Hardware, choose_device
from treecore.model.costs import measure_costs
from treecore.model.decoder import Decoder
from treecore.model.held import HeldRequests
from treecore.model.load import load_decoder, open_checkpoint
from treecore.service.operations import Operations
from treecore.service.telemetry import log_event
from treecore.service.worker import serve_worker

logger = logging.getLogger(__name__)


async def serve_model(settings: SsmSettings, stop: asyncio.Event, operations: Operations) -> None:
    """Serve until `stop`. Raises ConfigError for a checkpoint that is broken, or not one for this teacher."""
    ssm, teacher = settings.ssm, settings.teacher
    if ssm is None:
        raise ConfigError("--ssm: an SSM of kind model needs the directory of its checkpoint")
    on = Hardware(choose_device(settings.device), settings.attention, settings.block_len)
    decoder = await asyncio.to_thread(load_decoder, ssm, dtype=settings.dtype, embedding_from=teacher, on=on)
    forwards = await asyncio.to_thread(_for_teacher, decoder, settings)
    spec = forwards.spec
    tokenizer_dir = teacher or ssm
    grammars = await asyncio.to_thread(grammar_starter, tokenizer_dir, spec.vocab_size, spec.eos_token_ids)
    num_blocks, reuses = settings.kv_tokens // settings.block_len, settings.prefix_cache
    held = HeldRequests(forwards, num_blocks, settings.block_len, grammars, reuses_prefixes=reuses)
    worker_id = WorkerId(f"ssm-{secrets.token_hex(4)}")
    costs = await asyncio.to_thread(measure_costs, held, str(ssm))
    grower = Grower(worker_id, held, spec.vocab_size, forwards.output_token_ids)

    def describe(leaving: bool) -> Announcement:
        return replace(held.announcement(worker_id, "ssm", settings.name, leaving=leaving), costs=costs)

    await serve_worker(settings, describe, DraftRequest, grower.step, stop, operations)


def _for_teacher(decoder: Decoder, settings: SsmSettings) -> Decoder | TranslatedDecoder:
    """The decoder as one of its teacher's vocabulary. Raises ConfigError if it speaks of too many other tokens."""
    ssm, teacher = settings.ssm, settings.teacher
    if ssm is None or teacher is None:
        return decoder
    llm = Model(teacher, open_checkpoint(teacher)[0])
    found = token_map(Model(ssm, decoder.spec), llm, settings.min_shared_vocab)
    if found is None:
        return decoder
    log_event(
        logger, logging.INFO, "vocabulary mapped", num_shared=len(found.llm_twins), num_tokens=llm.spec.vocab_size
    )
    return TranslatedDecoder(decoder, found, llm.spec)
