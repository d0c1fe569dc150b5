"""The SSM worker process with a small model: loads it, announces itself, answers DraftRequests."""

import asyncio
import secrets
from pathlib import Path

from ssm_worker.grow import Grower
from ssm_worker.settings import SsmSettings
from treecore.errors import ConfigError
from treecore.grammar import grammar_starter
from treecore.messages import Announcement, DraftRequest, WorkerId
from treecore.model.held import HeldRequests
from treecore.model.load import load_decoder, open_checkpoint
from treecore.model.spec import ModelSpec
from treecore.service.worker import serve_worker


async def serve_model(settings: SsmSettings, stop: asyncio.Event) -> None:
    """Serve until `stop`. Raises ConfigError if the checkpoint cannot be loaded, or not for this teacher."""
    ssm, teacher = settings.ssm, settings.teacher
    if ssm is None:
        raise ConfigError("--ssm: an SSM of kind model needs the directory of its checkpoint")
    decoder = await asyncio.to_thread(load_decoder, ssm, dtype=settings.dtype, embedding_from=teacher)
    check_vocabulary(ssm, decoder.spec, teacher)
    spec = decoder.spec
    tokenizer_dir = teacher or ssm
    grammars = await asyncio.to_thread(grammar_starter, tokenizer_dir, spec.vocab_size, spec.eos_token_ids)
    num_blocks, reuses = settings.kv_tokens // settings.block_len, settings.prefix_cache
    held = HeldRequests(decoder, num_blocks, settings.block_len, grammars, reuses_prefixes=reuses)
    worker_id = WorkerId(f"ssm-{secrets.token_hex(4)}")
    grower = Grower(worker_id, held, spec.vocab_size, decoder.output_token_ids)

    def describe(leaving: bool) -> Announcement:
        return held.announcement(worker_id, "ssm", settings.name, leaving=leaving)

    await serve_worker(settings, describe, DraftRequest, grower.step, stop)


def check_vocabulary(ssm: Path, spec: ModelSpec, teacher: Path | None) -> None:
    """Raises ConfigError if the SSM speaks of other tokens than its teacher: it would run and never draft."""
    if teacher is None:
        return
    wanted = open_checkpoint(teacher)[0].vocab_size
    if spec.vocab_size != wanted:
        raise ConfigError(f"{ssm}: vocab_size={spec.vocab_size}, but {teacher} has {wanted}; it cannot draft for it")
