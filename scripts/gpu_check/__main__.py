"""`python -m gpu_check`: runs every check, then the tables; ends with one line and an exit status."""

import argparse
import os
import sys
import time

NO_DEVICE = 3


def main() -> int:
    """See scripts/gpu_check.sh for the exit status."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--no-tables", action="store_true", help="checks only")
    parser.add_argument("--interpret", action="store_true", help="a rehearsal without a GPU, of tiny sizes")
    args = parser.parse_args()
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
        from treecore.testing.bf16_interpreter import repair_bf16  # noqa: PLC0415 - imports triton

        repair_bf16()
    import torch  # noqa: PLC0415

    if not args.interpret and not torch.cuda.is_available():
        print(f"gpu_check: no CUDA device that torch {torch.__version__} can use; nothing was checked")
        return NO_DEVICE
    return run("cpu" if args.interpret else "cuda", with_tables=not args.no_tables)


def run(device: str, *, with_tables: bool) -> int:
    """All checks on `device`."""
    import torch  # noqa: PLC0415
    import triton  # noqa: PLC0415

    from gpu_check import checks, tables  # noqa: PLC0415

    started, is_rehearsal = time.perf_counter(), device == "cpu"
    card = "interpreter" if is_rehearsal else torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}, triton {triton.__version__}, {time.strftime('%Y-%m-%d')}")
    failed = 0
    for name, check in checks.CHECKS.items():
        began = time.perf_counter()
        problem = check(device)
        failed += problem is not None
        print(f"{'FAIL' if problem else 'ok  '} {name} ({time.perf_counter() - began:.0f} s) {problem or ''}")
    if with_tables:
        tables.print_tables(device)
    verdict = f"{failed} of {len(checks.CHECKS)} checks failed" if failed else "all checks passed"
    print(f"gpu_check: {verdict} on {card} in {time.perf_counter() - started:.0f} s")
    return 1 if failed else 0


sys.exit(main())
