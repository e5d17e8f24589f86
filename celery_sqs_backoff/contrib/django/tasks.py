"""A task for ``beat_schedule`` that sends the durable calls that are still in the outbox."""

from __future__ import annotations

from celery import current_app, shared_task

from .outbox import send_left_calls


@shared_task(name="sqs_backoff_outbox", ignore_result=True)  # type: ignore[untyped-decorator]
def send_outbox() -> None:
    """Send the durable calls that were not sent because of a crash or an outage."""
    send_left_calls(current_app)
