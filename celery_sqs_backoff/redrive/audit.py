"""Who has redriven what: one line in the log, and one event, per run."""

from __future__ import annotations

import json
import logging
import os
import pwd
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .events import Audit
from .report import RedriveReport
from .settings import Settings

__all__ = ["audited", "is_logged"]

logger = logging.getLogger(__name__)

_MOST_TASKS = 100


def audited(
    settings: Settings,
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
        options=_options(settings),
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


def _options(settings: Settings) -> dict[str, Any]:
    """The options that differ from their defaults. Ids are only counted."""
    usual = vars(Settings())
    found = {
        name: value if isinstance(value, str | int | float) else str(value)
        for name, value in vars(settings).items()
        if value != usual[name] and name not in ("selection", "probe")
    }
    if settings.probe is not None:
        found["probe"] = type(settings.probe).__name__
    for name, value in vars(settings.selection).items():
        if value is not None:
            found[name] = len(value) if name == "ids" else value
    return found
