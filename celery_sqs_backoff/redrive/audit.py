"""Who has redriven what: one line in the log, and one event, per run."""

from __future__ import annotations

import json
import logging
import os
import pwd
import socket
from collections import Counter
from collections.abc import Mapping, Sequence

from .events import Audit
from .options import Options
from .report import RedriveReport

logger = logging.getLogger(__name__)

_MOST_TASKS = 100


def audited(
    options: Options,
    report: RedriveReport,
    *,
    source: str,
    destinations: Sequence[str],
    by_task: Mapping[str, int],
) -> Audit:
    """Log the audit line of a run, and return it as an event."""
    event = Audit(
        who=_who(),
        source=source,
        destinations=tuple(sorted(set(destinations))),
        options=options.changed,
        by_task=dict(Counter(by_task).most_common(_MOST_TASKS)),
        sent=report.sent,
        deleted=report.deleted,
        ended=report.ended.value,
    )
    logger.info(
        "sqs_backoff.redrive %s",
        json.dumps(vars(event), default=str),
        extra={"sqs_backoff.redrive": dict(vars(event))},
    )
    return event


def is_logged() -> bool:
    """Whether the audit line gets anywhere: a command line that configures no logging loses it."""
    return logger.isEnabledFor(logging.INFO) and logger.hasHandlers()


def _who() -> str:
    """By the process, not by its environment, which says what one likes."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container whose user has no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
