"""The verifier process: loads the LLM, announces itself, answers VerifyRequests."""

import asyncio
import secrets
import sys

from llm_verifier.engine import Engine
from llm_verifier.settings import VerifierSettings
from treecore.grammar import grammar_starter
from treecore.messages import Announcement, VerifyRequest, WorkerId
from treecore.model.held import HeldRequests
from treecore.model.load import load_decoder
from treecore.service.lifecycle import run_service
from treecore.service.worker import serve_worker


async def serve(settings: VerifierSettings, stop: asyncio.Event) -> None:
    """Serve until `stop`. Raises ConfigError if the checkpoint cannot be loaded."""
    decoder = await asyncio.to_thread(load_decoder, settings.model, dtype=settings.dtype)
    spec = decoder.spec
    grammars = await asyncio.to_thread(grammar_starter, settings.model, spec.vocab_size, spec.eos_token_ids)
    num_blocks, reuses = settings.kv_tokens // settings.block_len, settings.prefix_cache
    held = HeldRequests(decoder, num_blocks, settings.block_len, grammars, reuses_prefixes=reuses)
    worker_id = WorkerId(f"verifier-{secrets.token_hex(4)}")
    engine = Engine(worker_id, held, spec.vocab_size)

    def describe(leaving: bool) -> Announcement:
        return held.announcement(worker_id, "verifier", settings.name, leaving=leaving)

    await serve_worker(settings, describe, VerifyRequest, engine.step, stop)


def main() -> int:
    """Run the verifier; returns the exit status."""
    return run_service("llm_verifier", VerifierSettings, serve, sys.argv[1:])
