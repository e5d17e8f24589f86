"""A classifier's verdict in one word, for tables of what is expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_sqs_backoff.retry.outcomes import Outcome, Verdict

#: UNKNOWN, so nothing is undone, but safe to repeat.
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
    except Exception as exc:  # noqa: BLE001  # whatever it is, it is what the test is about
        return exc
    pytest.fail("no error was raised")
