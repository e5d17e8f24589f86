"""Open an account, and then release its fundings one by one. A process may be killed at any time.

The next run waits for the workflow's lock, skips the steps that are recorded, and goes on. If the
worker gives the message up, the releases are undone, the last one first. Two messages for the same
application work on the same workflow. They share its lock, steps and keys.
"""

from __future__ import annotations

from typing import Any

from celery import shared_task

from celery_sqs_backoff import SQSBackoffTask, WorkflowTask

from . import bank
from .models import Application, LedgerEntry


@shared_task(base=WorkflowTask, bind=True, classify=bank.what_it_means)
def fund_account(self: Any, application_id: int) -> str:
    """Open the account, release its fundings, and return its number."""
    with self.workflow(f"application:{application_id}") as work:
        application = Application.objects.get(pk=application_id)
        key = work.key("account")
        account: str = work.step("account", bank.open_account, application.customer, key)
        Application.objects.filter(pk=application_id).update(account=account)
        for funding in application.fundings.order_by("pk"):
            name, amount = f"release {funding.pk}", str(funding.amount)
            key = work.key(name)
            work.step(
                name,
                bank.release,
                account,
                amount,
                key,
                confirm=post_entry.s(funding.pk),
                undo=take_back.s(funding.pk, account, amount, key),
            )
        return account


@shared_task(base=SQSBackoffTask)
def post_entry(reference: str, funding_id: int) -> None:
    LedgerEntry.objects.get_or_create(funding_id=funding_id, defaults={"reference": reference})


@shared_task(base=SQSBackoffTask, classify=bank.what_it_means)
def take_back(reference: str | None, funding_id: int, account: str, amount: str, key: str) -> None:
    # The bank may have released the funding, but we got no response. Ask again with the same key.
    if reference is None:
        try:
            reference = bank.release(account, amount, key)
        except bank.BankSaysNo:
            return  # The bank never released it.
    bank.take_back(reference, f"take back {reference}")
    entry = {"state": LedgerEntry.CANCELLED, "reference": reference}
    LedgerEntry.objects.update_or_create(funding_id=funding_id, defaults=entry)
