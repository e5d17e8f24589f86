"""The command line of the chaos test."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from .runner import run_chaos

#: Exit codes.
GOOD, BAD = 0, 1


def main() -> int:
    """Kill workers and spoil calls to SQS at random, and check that no message is lost.

    Exit code 0: every message is done or a dead letter with a reason, and every run beyond the
    first success is explained by an injected fault. 1: not so.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=2500, help="default %(default)s")
    parser.add_argument("--seed", type=int, help="default: drawn, and printed")
    parser.add_argument(
        "--seconds",
        type=float,
        help="of chaos; after it, up to a minute to finish. Default: a second for 20 tasks",
    )
    parser.add_argument(
        "--logs", type=Path, help="directory to keep workers' logs and calls in; default: not kept"
    )
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    sys.stdout.write(f"seed {seed}: the same with --seed {seed}\n")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        if options.logs is not None:
            options.logs.mkdir(parents=True, exist_ok=True)
        report = run_chaos(
            tasks=options.tasks,
            seed=seed,
            directory=options.logs or Path(directory),
            chaos_seconds=options.seconds or options.tasks / 20,
        )
    sys.stdout.writelines(f"{line}\n" for line in report.lines())
    sys.stdout.write(f"{'good' if report.is_good else 'BAD'}, {time.monotonic() - begin:.0f} s\n")
    return GOOD if report.is_good else BAD


if __name__ == "__main__":
    sys.exit(main())
