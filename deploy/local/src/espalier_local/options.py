"""The flags that describe a system, shared by every subcommand that starts one."""

import argparse
import os
from typing import get_args

from espalier_local.cache import ModelCache
from espalier_local.client import DYNAMIC, Tree
from espalier_local.models import DEFAULT_SSM, KNOWN, NO_SSM, SMOLLM2, SUFFIX_SSM, resolve_model, resolve_ssms
from espalier_local.output import StageBars
from espalier_local.system import Dtype, LogLevel, Offload, SystemConfig
from treecore.errors import ConfigError, InvalidRequest
from treecore.expand import expansion

_MAX_TREE_NODES = 4096  # a typing error, not a policy: the manager knows its own limit
_MAX_RANKS = 16  # likewise: each is a process, and none of them knows that it is one too many before it has started


def add_system_options(parser: argparse.ArgumentParser, *, log_level: LogLevel = "warning") -> None:
    """All flags but where to listen."""
    add = parser.add_argument_group("the system").add_argument
    add("--model", default=SMOLLM2.name, help=f"{', '.join(KNOWN)}, a directory, a .gguf file or a hub name")
    add(
        "--ssm",
        action="append",
        help=f"what drafts (repeatable): the directory of a small model, '{DEFAULT_SSM}' (the shipped one),"
        f" '{SUFFIX_SSM}' or '{SUFFIX_SSM}:FILE.jsonl' (what repeats in the text, or in a corpus), or '{NO_SSM}'",
    )
    add("--dtype", choices=get_args(Dtype), default="float32", help="precision of the weights (default float32)")
    add("--batch-invariant", action="store_true", help="the same bits with any tree and batch: no near-ties; slower")
    add("--offload", choices=get_args(Offload), default="none", help="where the LLM's layers wait for their turn")
    add("--offload-resident-layers", type=natural, default=0, metavar="N", help="first layers that stay in memory")
    add("--threads", type=int, help="CPU threads of each model process (default: half of the cores; in a group 1)")
    add("--tensor-parallel-size", type=positive, default=1, metavar="N", help="verifier ranks that split each layer")
    add("--pipeline-parallel-size", type=positive, default=1, metavar="N", help="verifier stages that split the layers")
    add(
        "--tree", type=tree, metavar="TREE", help="'dynamic' (default) or the children per node on each level, like 2,1"
    )
    add("--no-draft-ahead", action="store_true", help="do not draft while the LLM verifies")
    add("--no-prefix-cache", action="store_true", help="never reuse K and V of one request for another")
    add("--split", action="store_true", help="gateway and manager as processes of their own, as in a cluster")
    add("--log-level", choices=get_args(LogLevel), default=log_level)


def add_listen_options(parser: argparse.ArgumentParser) -> None:
    """--host and --port of the gateway."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=port, default=8000, help="port to listen on (default 8000; 0: any free one)")


def system_config(args: argparse.Namespace) -> SystemConfig:
    """The system that the flags describe; raises ConfigError in one line. Without --port it takes any free port."""
    threads = _threads(args.threads, _num_ranks(args.tensor_parallel_size, args.pipeline_parallel_size))
    with StageBars() as bars:
        model = resolve_model(args.model, ModelCache.from_environment(), bars)
    return SystemConfig(
        model=model,
        ssms=resolve_ssms(args.ssm or [DEFAULT_SSM], model),
        dtype=args.dtype,
        threads=threads,
        host=getattr(args, "host", "127.0.0.1"),
        port=getattr(args, "port", 0),
        tree=args.tree,
        draft_ahead=not args.no_draft_ahead,
        batch_invariant=args.batch_invariant,
        offload=args.offload,
        offload_resident_layers=args.offload_resident_layers,
        prefix_cache=not args.no_prefix_cache,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        split=args.split,
        log_level=args.log_level,
    )


def _num_ranks(tensor: int, pipeline: int) -> int:
    if tensor * pipeline > _MAX_RANKS:
        raise ConfigError(
            f"--tensor-parallel-size {tensor} x --pipeline-parallel-size {pipeline}: at most {_MAX_RANKS} ranks here"
        )
    return tensor * pipeline


def _threads(wanted: int | None, num_ranks: int) -> int:
    """Threads of a process: ranks compute at the same time, so together they should not want more than the cores."""
    most = max(1, num_cores() // num_ranks)
    if wanted is None:
        return max(1, num_cores() // 2) if num_ranks == 1 else 1
    if not 1 <= wanted <= most:
        ranks = "" if num_ranks == 1 else f" for {num_ranks} ranks"
        raise ConfigError(f"--threads {wanted}: this machine has {num_cores()} cores{ranks}; use 1 to {most}")
    return wanted


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def tree(text: str) -> Tree:
    """`dynamic`, or `2,1` as (2, 1); for argparse."""
    return DYNAMIC if text == DYNAMIC else widths(text)


def widths(text: str) -> tuple[int, ...]:
    """`2,1` as (2, 1); for argparse."""
    try:
        return tuple(expansion([int(part) for part in text.split(",")], _MAX_TREE_NODES))
    except (ValueError, InvalidRequest) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of widths like 2,2,1 ({error})") from error


def positive(text: str) -> int:
    """A whole number from 1; for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def natural(text: str) -> int:
    """A whole number from 0; for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


def port(text: str) -> int:
    """A TCP port; for argparse."""
    if not text.isdecimal() or not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port (0 to 65535)")
    return int(text)
