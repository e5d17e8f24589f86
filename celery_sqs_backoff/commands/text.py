"""Text from messages, made safe to print: it was written by whoever can send to the queue."""

from __future__ import annotations

import sys

from celery_sqs_backoff.text import printable

MOST_CHARACTERS = 400


def safe(text: object, limit: int = MOST_CHARACTERS) -> str:
    """Return a text on one line, of about ``limit`` characters, that a terminal does not obey.

    What stdout's encoding lacks becomes an escape: printing it must not end a command.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return printable(str(text), limit).encode(encoding, "backslashreplace").decode(encoding)
