"""The workflow, and the tasks that confirm and take back its steps, with retries of their own."""

from __future__ import annotations

from typing import Any

from celery import shared_task

from celery_sqs_backoff import SQSBackoffTask, WorkflowTask

from . import bank
from .models import LedgerEntry


@shared_task(base=WorkflowTask, bind=True, classify=bank.what_it_means)
def fund_account(self: Any, application_id: int) -> str:
    from .workflow import fund

    return fund(self, application_id)


@shared_task(base=SQSBackoffTask)
def post_entry(released: dict[str, Any]) -> None:
    LedgerEntry.objects.filter(pk=released["entry"], state=LedgerEntry.PENDING).update(
        state=LedgerEntry.POSTED, reference=released["reference"]
    )


@shared_task(base=SQSBackoffTask, classify=bank.what_it_means)
def take_back(
    released: dict[str, Any] | None, account: str, funding: int, amount: str, key: str
) -> None:
    # Without a result nobody knows whether the bank has done it. Asked again with the same key, it
    # says so, or does it now; either way there is something to take back.
    reference = released["reference"] if released else bank.release(account, amount, key)
    bank.take_back(reference, f"take back {reference}")
    LedgerEntry.objects.filter(funding=funding).update(state=LedgerEntry.CANCELLED)
