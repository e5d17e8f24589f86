"""``python -m tests.simulation --seed 1 --histories 20000`` looks longer than ``make test``."""

from __future__ import annotations

import argparse
import sys

from .history import draw, draw_with_provider
from .search import first_failure, reduced


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate workers and SQS with faults.")
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--histories", type=int, default=2_000)
    parser.add_argument("--provider", action="store_true", help="of a provider that is down")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.histories)
    failure = first_failure(seeds, draw_with_provider if options.provider else draw)
    if failure is None:
        print(f"{options.histories} histories from seed {options.seed}: nothing is wrong")
        return 0
    seed, history, wrong = failure
    print(f"# seed {seed}: {wrong[0]}")
    print(reduced(history).script())
    return 1


if __name__ == "__main__":
    sys.exit(main())
