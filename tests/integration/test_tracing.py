"""Each run has a span, which fits the spans of OpenTelemetry for Celery, botocore and SQS."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from opentelemetry.instrumentation.boto3sqs import Boto3SQSInstrumentor
from opentelemetry.instrumentation.botocore import BotocoreInstrumentor
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from celery_sqs_backoff import NonRetryable, Retryable, Schedule, SQSBackoffTask, redrive
from celery_sqs_backoff.testing import LocalQueue
from tests.support.processes import eventually


@pytest.fixture
def spans():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with ExitStack() as stack:
        for instrumentor in (CeleryInstrumentor(), BotocoreInstrumentor(), Boto3SQSInstrumentor()):
            instrumentor.instrument(tracer_provider=provider, skip_dep_check=True)
            stack.callback(instrumentor.uninstrument)
        yield exporter


@pytest.fixture
def state(sqs_celery_app):
    found = {"broken": True}

    @sqs_celery_app.task(
        base=SQSBackoffTask, bind=True, name="traced.flaky", backoff=Schedule([1]), shared=False
    )
    def flaky(self):
        if self.request.retries == 0:
            raise Retryable("SECRET is down")

    @sqs_celery_app.task(base=SQSBackoffTask, name="traced.broken", shared=False)
    def broken():
        if found["broken"]:
            raise NonRetryable("SECRET is wrong", not_processed=True)

    return found | {"flaky": flaky, "broken": broken, "state": found}


def runs(spans: InMemorySpanExporter, task: str) -> list[ReadableSpan]:
    """Return the spans of a task's runs, oldest first."""
    found = [span for span in spans.get_finished_spans() if span.name == f"run/{task}"]
    return sorted(found, key=lambda span: span.start_time or 0)


def sent(spans: InMemorySpanExporter, task: str) -> ReadableSpan:
    [span] = [s for s in spans.get_finished_spans() if s.name == f"apply_async/{task}"]
    return span


def test_span_of_run(spans, sqs_worker, state):
    """The span of a run has the outcome, and the sender's span as its parent."""
    with sqs_worker():
        state["flaky"].delay()
        eventually(lambda: len(runs(spans, "traced.flaky")) == 2, timeout=30)
    first, second = runs(spans, "traced.flaky")
    assert first.attributes["sqs_backoff.outcome"] == "retryable"
    assert first.attributes["sqs_backoff.delay_seconds"] == 1
    assert first.attributes["sqs_backoff.attempt"] == 1
    [retry] = [event for event in first.events if event.name == "sqs_backoff.retry"]
    assert retry.attributes["sqs_backoff.delay_seconds"] == 1
    assert second.attributes["sqs_backoff.outcome"] == "succeeded"
    assert second.attributes["sqs_backoff.receive_count"] == 2
    assert second.attributes["sqs_backoff.attempt"] == 2
    assert first.attributes["sqs_backoff.message_id"] == second.attributes["sqs_backoff.message_id"]
    for run in (first, second):
        assert run.parent.span_id == sent(spans, "traced.flaky").context.span_id
        ours = {k: v for k, v in run.attributes.items() if k.startswith("sqs_backoff.")}
        assert "SECRET" not in repr(ours)


def test_link_of_replay(spans, sqs_celery_app, sqs_worker, sqs_queue, sqs_client, state):
    """After a redrive, the span of the new run has a link to the failed run, in the same trace."""
    assert sqs_queue.dlq is not None
    with sqs_worker():
        state["broken"].delay()
        eventually(lambda: depth(sqs_client, sqs_queue.dlq) == 1, timeout=30)
        state["state"]["broken"] = False
        assert redrive(sqs_celery_app, sqs_queue.name).sent == 1
        eventually(lambda: len(runs(spans, "traced.broken")) == 2, timeout=30)
    failed, replay = runs(spans, "traced.broken")
    [given_up] = [event for event in failed.events if event.name == "sqs_backoff.give_up"]
    assert given_up.attributes["sqs_backoff.reason"] == "not retryable"
    [link] = [link for link in replay.links if "sqs_backoff.link" in link.attributes]
    assert link.context.span_id == failed.context.span_id
    assert link.context.trace_id == failed.context.trace_id
    assert replay.context.trace_id == sent(spans, "traced.broken").context.trace_id


def depth(client: Any, queue: LocalQueue) -> int:
    found = client.get_queue_attributes(QueueUrl=queue.url, AttributeNames=["All"])["Attributes"]
    return sum(int(v) for k, v in found.items() if k.startswith("ApproximateNumberOf"))
