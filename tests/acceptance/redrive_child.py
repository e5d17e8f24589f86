"""Run a redrive in a process of its own, so that a test can kill it.

The test starts it with ``python -m tests.acceptance.redrive_child``.
"""

from __future__ import annotations

import json
import sys

from celery import Celery

from celery_sqs_backoff.redrive import redrive, run
from celery_sqs_backoff.redrive.events import as_dict
from tests.support.differences import RACES_WITH_ITSELF, differs

#: A redrive hides the messages that it receives for this time. The default is 30 seconds. The next
#: run can receive the messages of a killed run only when this time is over.
HOLD_SECONDS = 4

THREADS = 1 if differs(RACES_WITH_ITSELF) else 4


def main(settings: str, source: str, journal: str, output: str) -> None:
    """Redrive a queue, and write each event to a file."""
    run.MAX_THREADS, run.HOLD_SECONDS = THREADS, HOLD_SECONDS
    app = Celery("child", set_as_current=False)
    app.conf.update(json.loads(settings))
    with open(output, "a", buffering=1) as events:
        redrive(
            app,
            source,
            journal=journal,
            max_replays=1_000,
            include_unknown=True,
            on_event=lambda event: print(json.dumps(as_dict(event), default=str), file=events),
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
