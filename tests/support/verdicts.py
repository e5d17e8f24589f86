"""A classifier's verdict in one word, for tables of what is expected."""

from __future__ import annotations

from celery_sqs_backoff.retry.outcomes import Outcome, Verdict

__all__ = ["REPEATED", "shown"]

#: UNKNOWN, so nothing is undone, but safe to repeat.
REPEATED = "in doubt, but repeated"


def shown(verdict: object) -> Outcome | str | None:
    if not isinstance(verdict, Verdict):
        return None
    if verdict.safe_to_repeat:
        assert verdict.outcome is Outcome.UNKNOWN
        return REPEATED
    return verdict.outcome
