"""The workflow, and the tasks that confirm and take back its steps, with retries of their own."""

from __future__ import annotations

from typing import Any

from celery import shared_task

from celery_sqs_backoff import SQSBackoffTask

from . import bank
from .models import LedgerEntry


@shared_task(base=SQSBackoffTask, bind=True)
def fund_account(self: Any, application_id: int) -> str:
    from .workflow import fund

    return fund(self, application_id)


@shared_task(base=SQSBackoffTask)
def post_entry(released: dict[str, Any]) -> None:
    LedgerEntry.objects.filter(pk=released["entry"], state=LedgerEntry.PENDING).update(
        state=LedgerEntry.POSTED, reference=released["reference"]
    )


@shared_task(base=SQSBackoffTask)
def take_back(released: dict[str, Any]) -> None:
    # The reference is there once, so it is a key as good as any.
    bank.take_back(released["reference"], f"take back {released['reference']}")
    LedgerEntry.objects.filter(pk=released["entry"]).update(state=LedgerEntry.CANCELLED)
