"""Make text from messages safe to print, because any sender to the queue may have written it."""

from __future__ import annotations

import sys

from celery_sqs_backoff.text import printable

MOST_CHARACTERS = 400


def safe(text: object, limit: int = MOST_CHARACTERS) -> str:
    """Return a text as one line of at most about ``limit`` characters, safe for a terminal.

    Control codes are escaped. Characters that stdout's encoding lacks are escaped too, because
    printing them would end the command with an error.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return printable(str(text), limit).encode(encoding, "backslashreplace").decode(encoding)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 message`` or ``2 messages``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
