"""Stands in for a service in the launcher's tests: `fake_service.py KIND ...` with the flags of the real one.

verifier, ssm: announce themselves until SIGTERM. manager: answers GET /ready with 200. refuse, crash: what they say.
"""

import argparse
import asyncio
import signal
import sys

from treecore.messages import Announcement, BlockUsage, WorkerId
from treecore.service.bus import Broker, NatsBus
from treecore.service.presence import Announcer


async def announce(args: argparse.Namespace, stop: asyncio.Event) -> None:
    """Be a worker that has all the time in the world."""
    bus = await NatsBus.connect(Broker(args.nats_url, "espalier"), args.name, stop)
    blocks = BlockUsage(1, 0, 0, 1, 16)

    def describe(leaving: bool) -> Announcement:
        return Announcement(WorkerId("w"), args.kind, args.name, 8, 8, (), blocks, leaving)

    announcing = asyncio.create_task(Announcer(bus, describe).run())
    await stop.wait()
    announcing.cancel()
    await asyncio.wait({announcing})
    await bus.close()


async def answer(args: argparse.Namespace, stop: asyncio.Event) -> None:
    """Be a gateway that is ready."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(respond, args.host, args.port):
        await stop.wait()


async def serve(args: argparse.Namespace) -> None:
    """Run until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await (answer if args.kind == "manager" else announce)(args, stop)
    print("bye", flush=True)


def main() -> None:
    """Read the flags and be that service."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    for flag in ("--nats-url", "--name", "--host", "--port"):
        parser.add_argument(flag)
    args, _ = parser.parse_known_args()
    if args.kind == "refuse":
        sys.exit("llm_verifier: model.safetensors is corrupt")
    if args.kind == "crash":
        sys.exit(70)
    asyncio.run(serve(args))


main()
