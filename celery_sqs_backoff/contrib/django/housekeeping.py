"""Sends, from the workers' main processes, what the outbox has left behind."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from celery.signals import worker_ready, worker_shutting_down
from celery.utils.log import get_logger

from celery_sqs_backoff.safe.outbox import CLAIM_SECONDS, send_left_calls, use_autocommit
from celery_sqs_backoff.store.connections import ask_and_close
from celery_sqs_backoff.text import error_site

__all__ = ["connect"]

logger = get_logger(__name__)

_over = threading.Event()


class _Over(Exception):
    """The worker is shutting down."""


def connect() -> None:
    """Start and stop with a worker; called once, by the app config."""
    worker_ready.connect(_start, weak=False, dispatch_uid="celery_sqs_backoff.outbox")
    worker_shutting_down.connect(_stop, weak=False, dispatch_uid="celery_sqs_backoff.outbox")


def _start(sender: Any, **_: Any) -> None:
    _over.clear()
    threading.Thread(
        target=_run, args=(sender.app,), name="celery-sqs-backoff-outbox", daemon=True
    ).start()


def _stop(**_: Any) -> None:
    _over.set()


def _run(app: Any, *, every: float = CLAIM_SECONDS) -> None:
    while not _over.wait(every):
        try:
            ask_and_close(partial(_send, app))
        except _Over:
            return
        except Exception as exc:  # noqa: BLE001  # the database is away, or not migrated: the thread must live on
            logger.error("sqs_backoff.outbox_failed: %s", error_site(exc.__cause__ or exc))


def _send(app: Any) -> None:
    use_autocommit()
    send_left_calls(app, between=_end_when_over)


def _end_when_over() -> None:
    if _over.is_set():
        raise _Over
