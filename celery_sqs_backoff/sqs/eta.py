"""When a message's task is due."""

from __future__ import annotations

from datetime import datetime, timezone


def parse_eta(header: object) -> float | None:
    """Read the ``eta`` header (ISO 8601, by default UTC) as seconds since the epoch.

    ``None`` if it is missing or not a time; Celery reports the latter.
    """
    if not isinstance(header, str):
        return None
    try:
        eta = datetime.fromisoformat(header.replace("Z", "+00:00"))
    except ValueError:
        return None
    return (eta if eta.tzinfo else eta.replace(tzinfo=timezone.utc)).timestamp()
