"""Adds facts about retries and dead letters to the OpenTelemetry span of a run.

``opentelemetry-instrumentation-celery`` makes the span. This module adds attributes, events and a
link to it, and makes no spans. It does nothing if OpenTelemetry is not loaded. It runs in the
process that runs the task, where this span is the current span.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any, Final

from ..retry.decision import DeadLetter, End, Hide, RunEnd
from ..retry.outcomes import Outcome
from ..sqs.delivery import Delivery

#: A module of OpenTelemetry. If it is not loaded, a run has no span.
TRACER: Final = "opentelemetry.trace"

_SUCCESSES: Final = frozenset({End.RETURNED, End.IGNORED})


def note_end(ended: RunEnd, delivery: Delivery, *, attempt: int) -> str | None:
    """Note on the current span how a run has ended. Never raises.

    Args:
        delivery: facts about the run's message.
        attempt: the number of runs of the message, this one included.

    Returns:
        The span as a W3C ``traceparent``, or ``None`` if there is no span.
    """
    api: Any = sys.modules.get(TRACER)
    carrier: dict[str, str] = {}
    if api is not None:
        with suppress(Exception):  # an error in tracing must not fail a task that has ended
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            propagator = TraceContextTextMapPropagator()
            propagator.inject(carrier)
            if (span := api.get_current_span()).is_recording():
                _note(api, propagator, span, ended, delivery, attempt)
    return carrier.get("traceparent")


def _note(
    api: Any, propagator: Any, span: Any, ended: RunEnd, delivery: Delivery, attempt: int
) -> None:
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
    # A message that was redriven from the dead-letter queue names the span of its failed run. For
    # other messages ``original`` is not valid.
    context = propagator.extract({"traceparent": delivery.replay_of or ""})
    original = api.get_current_span(context).get_span_context()
    if original.is_valid:
        span.add_link(original, {"sqs_backoff.link": "replay of"})
