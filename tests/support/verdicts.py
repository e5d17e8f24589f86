"""Reduce a classifier's verdict to one value, for tables of expected verdicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_sqs_backoff.retry.outcomes import Outcome, Verdict

#: The outcome is UNKNOWN, so the task may have done its work. But its call is safe to repeat, so
#: the task is retried.
REPEATED = "in doubt, but repeated"


def shown(verdict: object) -> Outcome | str | None:
    if not isinstance(verdict, Verdict):
        return None
    if verdict.safe_to_repeat:
        assert verdict.outcome is Outcome.UNKNOWN
        return REPEATED
    return verdict.outcome


def raised(call: Callable[..., object], *args: Any, **options: Any) -> Exception:
    """Return the error of a call that must fail."""
    try:
        call(*args, **options)
    except Exception as exc:  # noqa: BLE001  # the test checks which error it is
        return exc
    pytest.fail("no error was raised")
