"""Applies the rules of ``celery sqs-doctor`` to the app and its queues when a worker starts.

The check-up makes no calls to AWS. It uses the attributes of the worker's queues, which the worker
has already read. It does not see the attributes of dead-letter queues. The worker logs one line for
each rule that finds something.

The check-up runs in a thread of its own. An error in this thread is logged, and never stops the
worker.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Final

from celery.utils.log import get_logger

from ..doctor import Finding, ProjectFacts, QueueFacts, Severity, examine
from ..doctor.look import facts_of_app, read_ignored
from ..sqs.queues import Queue
from ..text import BUG_CALLS, error_site
from ..threads import start_daemon

logger = get_logger(__name__)

_LEVELS: Final = {
    Severity.ERROR: logging.ERROR,
    Severity.WARNING: logging.WARNING,
    Severity.INFO: logging.INFO,
}


def start_check_up(app: Any, queues: Iterable[tuple[str, Queue]]) -> None:
    """Check the app and its queues in a thread, and log the findings.

    Args:
        app: the Celery app.
        queues: the queues that the worker consumes, each with its name in Celery.
    """
    if start_daemon("sqs-check-up", functools.partial(_run, app, list(queues))) is None:
        logger.warning("sqs_backoff.no_thread_left: the settings are not checked")


def _run(app: Any, queues: list[tuple[str, Queue]]) -> None:
    try:
        for severity, line in check_up(app, queues):
            logger.log(_LEVELS[severity], "sqs_backoff.finding: %s", line)
    except Exception as exc:  # noqa: BLE001
        # This is a bug, or a setting has a type that no rule expects. The worker runs nevertheless.
        logger.error("sqs_backoff.check_up_failed: %s", error_site(exc, calls=BUG_CALLS))


def check_up(app: Any, queues: Iterable[tuple[str, Queue]]) -> list[tuple[Severity, str]]:
    """Return a severity and a log line for each rule that found something, most severe first."""
    found = examine(
        ProjectFacts(
            app=facts_of_app(app),
            queues=tuple(
                QueueFacts(name=name, url=queue.url, attributes=queue.attributes)
                for name, queue in queues
            ),
        ),
        ignore=read_ignored(app),
    )
    groups = (list(group) for _, group in groupby(found, key=lambda finding: finding.id))
    return [(group[0].severity, _line(group)) for group in groups]


def _line(findings: list[Finding]) -> str:
    first, more = findings[0], len(findings) - 1
    others = f" (and {more} more)" if more else ""
    return f"{first.id} {first.subject}{others}: {first.evidence}. {first.consequence}"
