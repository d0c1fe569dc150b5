"""The SSM worker process without weights: announces itself, answers DraftRequests. It needs no torch."""

import asyncio
import secrets

from ssm_worker.corpus import read_corpus
from ssm_worker.settings import SsmSettings
from ssm_worker.suffix import SuffixDrafter
from ssm_worker.texts import HeldTexts
from treecore.errors import ConfigError
from treecore.messages import Announcement, DraftRequest, WorkerId
from treecore.model.families import read_spec
from treecore.service.operations import Operations
from treecore.service.worker import serve_worker


async def serve_suffix(settings: SsmSettings, stop: asyncio.Event, operations: Operations) -> None:
    """Serve until `stop`. Raises ConfigError without a teacher, or for one or a corpus that cannot be read."""
    if settings.teacher is None:
        raise ConfigError("--teacher: an SSM of kind suffix needs the directory of the LLM that it drafts for")
    spec = read_spec(settings.teacher)
    corpus = None
    if settings.corpus is not None:
        corpus = await asyncio.to_thread(
            read_corpus, settings.corpus, settings.teacher, spec.vocab_size, settings.corpus_tokens
        )
    held = HeldTexts(settings.kv_tokens // settings.block_len, settings.block_len)
    worker_id = WorkerId(f"ssm-{secrets.token_hex(4)}")
    drafter = SuffixDrafter(worker_id, held, spec.vocab_size, spec.context_len, settings.min_match, corpus)

    def describe(leaving: bool) -> Announcement:
        sizes = spec.vocab_size, spec.context_len, spec.eos_token_ids
        return Announcement(worker_id, "ssm", settings.name, *sizes, held.usage(), leaving)

    await serve_worker(settings, describe, DraftRequest, drafter.step, stop, operations)
