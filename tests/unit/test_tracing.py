"""The attributes that a run of a task adds to its OpenTelemetry span."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from celery_sqs_backoff.retry.budget import GiveUpReason
from celery_sqs_backoff.retry.decision import DeadLetter, End, Hide, RunEnd
from celery_sqs_backoff.retry.outcomes import Outcome
from celery_sqs_backoff.sqs.dead_letter import REPLAY_ATTRIBUTE, replay_of
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.task.tracing import note_end

TRACE = f"00-{7:032x}-{8:016x}-01"


@pytest.fixture
def provider():
    exporter, made = InMemorySpanExporter(), TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    yield made, exporter
    made.shutdown()


RETURNED = RunEnd(End.RETURNED)


def span_of(
    provider: tuple[TracerProvider, InMemorySpanExporter],
    ended: RunEnd = RETURNED,
    replay_of: str | None = None,
) -> ReadableSpan:
    delivery = Delivery("m", "url", 0.0, 3, replay_of=replay_of)
    with provider[0].get_tracer("test").start_as_current_span("run") as now:
        context = now.get_span_context()
        flags = f"{context.trace_flags:02x}"
        named = note_end(ended, delivery, attempt=2)
        assert named == f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags}"
    [span] = provider[1].get_finished_spans()
    return span


@pytest.mark.parametrize(
    ("ended", "attributes", "events"),
    [
        (RunEnd(End.RETURNED), {"outcome": "succeeded"}, []),
        (
            RunEnd(End.RAISED, Hide(7, Outcome.RETRYABLE)),
            {"outcome": "retryable", "delay_seconds": 7.0},
            ["sqs_backoff.retry"],
        ),
        (
            RunEnd(End.RAISED, DeadLetter(GiveUpReason.NOT_RETRYABLE, Outcome.UNKNOWN)),
            {"outcome": "unknown", "reason": "not retryable"},
            ["sqs_backoff.give_up"],
        ),
        (RunEnd(End.ABORTED), {"outcome": "unknown"}, []),
    ],
    ids=["success", "retry", "dead letter", "crash"],
)
def test_span_of_run(provider, ended, attributes, events):
    """The span of a run has attributes and events that say how the run ended."""
    span = span_of(provider, ended)
    common = {"message_id": "m", "receive_count": 3, "attempt": 2}
    assert dict(span.attributes) == {
        f"sqs_backoff.{name}": value for name, value in {**common, **attributes}.items()
    }
    assert [event.name for event in span.events] == events
    assert span.links == ()


def test_link_of_replay(provider):
    """If a dead letter was replayed, the span of the new run links to the run that failed."""
    [link] = span_of(provider, replay_of=TRACE).links
    assert (link.context.trace_id, link.context.span_id) == (7, 8)
    assert link.context.is_remote


@pytest.mark.parametrize(
    "mark",
    [
        "",
        "x",
        "[]",
        "{}",
        '{"trace": 7}',
        '{"trace": "00-0-0-0"}',
        f'{{"trace": "00-{0:032x}-{0:016x}-01"}}',
        '{"trace": "' + "x" * 5_000 + '"}',
    ],
)
def test_forged_trace(provider, mark):
    """A forged or invalid trace in a message makes no link."""
    message = {"MessageAttributes": {REPLAY_ATTRIBUTE: {"StringValue": mark}}}
    assert span_of(provider, replay_of=replay_of(message)).links == ()


def test_broken_tracing(monkeypatch):
    """If the tracing library raises, the task does not fail."""

    class Broken:
        @staticmethod
        def get_current_span():
            raise OSError

    monkeypatch.setitem(sys.modules, "opentelemetry.trace", Broken)
    assert note_end(RETURNED, Delivery("m", "url", 0.0), attempt=1) is None


def test_no_opentelemetry():
    """If the user's program has not imported OpenTelemetry, the worker does not either."""
    code = (
        "import sys; from celery_sqs_backoff.task.tracing import note_end;"
        "assert note_end(None, None, attempt=1) is None; assert 'opentelemetry' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
