"""Notes on OpenTelemetry's span of a run, about retries and dead letters.

The span is that of ``opentelemetry-instrumentation-celery``; this module adds attributes, events
and a link to it, and makes no spans. It does so only if OpenTelemetry is loaded. It runs in the
process that runs the task, where the span is the current one.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, Final

from ..retry.decision import DeadLetter, End, Hide
from ..retry.outcomes import Outcome

if TYPE_CHECKING:
    from .handover import Run

_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")

_SUCCESSES: Final = frozenset({End.RETURNED, End.IGNORED})


def current_trace() -> str | None:
    """Return the current span as a W3C ``traceparent``, if there is one. Never raises."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    try:
        context = api.get_current_span().get_span_context()
    except Exception:  # noqa: BLE001  # a tracing library must not fail a task that has ended
        return None
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def note_end(run: Run, *, attempt: int) -> None:
    """Note on the current span how a run has ended. Never raises.

    Args:
        run: with its report.
        attempt: runs of the message, this one included.
    """
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None or run.report is None:
        return
    try:
        span = api.get_current_span()
        if span.is_recording():
            _note(api, span, run, attempt)
    except Exception:  # noqa: BLE001  # a tracing library must not fail a task that has ended
        return


def _note(api: Any, span: Any, run: Run, attempt: int) -> None:
    assert run.report is not None
    assert run.delivery is not None
    ended, delivery = run.report.ended, run.delivery
    decision = ended.decision
    outcome = decision.outcome if decision is not None else Outcome.UNKNOWN
    facts: dict[str, Any] = {
        "sqs_backoff.outcome": "succeeded" if ended.end in _SUCCESSES else outcome.value,
        "sqs_backoff.attempt": attempt,
    }
    if isinstance(decision, Hide):
        facts["sqs_backoff.delay_seconds"] = float(decision.seconds)
        span.add_event("sqs_backoff.retry", facts)
    elif isinstance(decision, DeadLetter):
        facts["sqs_backoff.reason"] = decision.reason.value
        span.add_event("sqs_backoff.give_up", facts)
    span.set_attributes(
        {
            **facts,
            "sqs_backoff.message_id": delivery.message_id,
            "sqs_backoff.receive_count": delivery.receive_count,
        }
    )
    if (original := _span_context(api, delivery.replay_of)) is not None:
        span.add_link(original, {"sqs_backoff.link": "replay of"})


def _span_context(api: Any, traceparent: str | None) -> Any:
    """Return the context that a replay names, or ``None`` for any other text of the message."""
    found = _TRACEPARENT.fullmatch(traceparent or "")
    if found is None:
        return None
    context = api.SpanContext(
        trace_id=int(found[1], 16),
        span_id=int(found[2], 16),
        is_remote=True,
        trace_flags=api.TraceFlags(int(found[3], 16)),
    )
    return context if context.is_valid else None
