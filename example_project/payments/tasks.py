"""Open an account, then release its fundings one by one, wherever a process ends.

The next run takes the lock (when the lease of the one that was killed is over), skips what is
recorded, and goes on. If the message is given up, what was released is taken back, the last funding
first. Two messages for one application are one workflow: they share its lock, steps and keys.
"""

from __future__ import annotations

from typing import Any

from celery import shared_task

from celery_sqs_backoff import SQSBackoffTask, WorkflowTask

from . import bank
from .models import Application, LedgerEntry


@shared_task(base=WorkflowTask, bind=True, classify=bank.what_it_means)
def fund_account(self: Any, application_id: int) -> str:
    """Return the number of the account."""
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
    if reference is None:  # The bank may have done it, so ask again with the same key.
        try:
            reference = bank.release(account, amount, key)
        except bank.BankSaysNo:
            return  # It was never done.
    bank.take_back(reference, f"take back {reference}")
    entry = {"state": LedgerEntry.CANCELLED, "reference": reference}
    LedgerEntry.objects.update_or_create(funding_id=funding_id, defaults=entry)
