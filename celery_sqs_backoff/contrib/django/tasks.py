"""The task that sends the calls left in the outbox, for ``beat_schedule``."""

from __future__ import annotations

from celery import current_app, shared_task

from .outbox import send_left_calls


@shared_task(name="sqs_backoff_outbox", ignore_result=True)  # type: ignore[untyped-decorator]
def send_outbox() -> None:
    """Send the durable calls that a crash or an outage has left."""
    send_left_calls(current_app)
