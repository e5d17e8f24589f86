"""Celery's autoretry options, read as ours."""

from __future__ import annotations

from typing import Any

from .policies import Exponential, FullJitter, Schedule

#: Keywords of ``@app.task`` that are Celery's, although ``celery.Task`` has no such attributes.
AUTORETRY_OPTIONS = (
    "autoretry_for",
    "dont_autoretry_for",
    "retry_backoff",
    "retry_backoff_max",
    "retry_jitter",
    "retry_kwargs",
)


def options_from_autoretry(task: Any) -> dict[str, Any]:
    """Translate ``autoretry_for`` and its family into options; ``{}`` if the task has none.

    The delays are those of Celery's ``add_autoretry_behaviour``: ``retry_backoff`` is the base, in
    seconds (``True`` = 1), of an exponential capped at ``retry_backoff_max`` (default 600), with
    full jitter unless ``retry_jitter`` is false; without it every delay is the ``countdown`` of
    ``retry_kwargs``, else ``default_retry_delay`` (180 seconds).
    """
    autoretry_for = tuple(getattr(task, "autoretry_for", ()))
    if not autoretry_for:
        return {}
    kwargs = dict(getattr(task, "retry_kwargs", {}))
    options: dict[str, Any] = {
        "retry_on": autoretry_for,
        "never_retry": tuple(getattr(task, "dont_autoretry_for", ())),
    }
    if backoff := getattr(task, "retry_backoff", False):
        shape = FullJitter if getattr(task, "retry_jitter", True) else Exponential
        base = int(max(1.0, backoff))
        options["backoff"] = shape(
            base=base, cap=max(base, getattr(task, "retry_backoff_max", 600))
        )
    else:
        options["backoff"] = Schedule([kwargs.get("countdown", task.default_retry_delay)])
    if "max_retries" in kwargs:
        options["max_retries"] = kwargs["max_retries"]
    return options
