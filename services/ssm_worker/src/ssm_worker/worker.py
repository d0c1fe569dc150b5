"""The SSM worker process: loads the small model, announces itself, answers DraftRequests."""

import asyncio
import secrets
import sys

from ssm_worker.grow import Grower
from ssm_worker.settings import SsmSettings
from treecore.messages import Announcement, DraftRequest, WorkerId
from treecore.model.held import HeldRequests
from treecore.model.load import load_decoder
from treecore.service.lifecycle import run_service
from treecore.service.worker import serve_worker


async def serve(settings: SsmSettings, stop: asyncio.Event) -> None:
    """Serve until `stop`. Raises ConfigError if the checkpoint cannot be loaded."""
    decoder = await asyncio.to_thread(load_decoder, settings.ssm, dtype=settings.dtype, embedding_from=settings.teacher)
    spec = decoder.spec
    held = HeldRequests(decoder, settings.kv_tokens // settings.block_len, settings.block_len)
    worker_id = WorkerId(f"ssm-{secrets.token_hex(4)}")
    grower = Grower(worker_id, held, spec.vocab_size, decoder.output_token_ids)

    def describe(leaving: bool) -> Announcement:
        return Announcement(
            worker_id,
            "ssm",
            settings.name,
            spec.vocab_size,
            spec.context_len,
            spec.eos_token_ids,
            held.usage(),
            leaving,
        )

    await serve_worker(settings, describe, DraftRequest, grower.step, stop)


def main() -> int:
    """Run the SSM worker; returns the exit status."""
    return run_service("ssm_worker", SsmSettings, serve, sys.argv[1:])
