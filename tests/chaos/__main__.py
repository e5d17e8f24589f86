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
    """Kill workers and let calls to SQS fail at random, and check that no message is lost.

    The exit code is 0 if each task has succeeded or become a dead letter with a reason. If a task
    ran again after that, an injected fault must explain it. Otherwise the exit code is 1.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=2500, help="number of tasks [%(default)s]")
    parser.add_argument("--seed", type=int, help="default: a random seed, which is printed")
    parser.add_argument(
        "--seconds",
        type=float,
        help="how long to kill workers and let calls fail. The workers then have a minute to "
        "finish. Default: a second for each 20 tasks",
    )
    parser.add_argument(
        "--logs",
        type=Path,
        help="directory for the workers' logs and calls; default: they are not kept",
    )
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    sys.stdout.write(f"seed {seed}: --seed {seed} draws the same tasks, faults and kills\n")
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
