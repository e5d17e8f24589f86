"""Text from messages, made safe to print: it was written by whoever can send to the queue."""

from __future__ import annotations

from celery_sqs_backoff.text import printable

__all__ = ["safe"]

MOST_CHARACTERS = 400


def safe(text: object, limit: int = MOST_CHARACTERS) -> str:
    """Return a text on one line, of about ``limit`` characters, that a terminal does not obey."""
    return printable(str(text), limit)
