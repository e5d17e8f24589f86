"""Open an account, then release its fundings one by one: resumable at every line.

The process may end anywhere. The next run takes the lock (when the lease of the one that was killed
is over), skips what is recorded, and goes on.
"""

from __future__ import annotations

from typing import Any

from celery_sqs_backoff import NonRetryable

from . import bank, tasks
from .models import Application, Funding, LedgerEntry


def fund(task: Any, application_id: int) -> str:
    """Return the number of the account."""
    # Two messages for one application are one workflow: they share its lock, steps and keys.
    scope = f"application:{application_id}"
    with task.exclusive(scope):
        application = Application.objects.get(pk=application_id)
        key = task.idempotency_key("account", scope=scope)
        account: str = task.step(
            "account", bank.open_account, application.customer, key, scope=scope
        )
        Application.objects.filter(pk=application_id).update(account=account)
        for funding in application.fundings.order_by("pk"):
            name = f"release {funding.pk}"
            key = task.idempotency_key(name, scope=scope)
            try:
                task.step(
                    name,
                    _release,
                    account,
                    funding,
                    key,
                    confirm=tasks.post_entry.s(),
                    undo=tasks.take_back.s(),
                    scope=scope,
                )
            except bank.BankSaysNo as exc:
                LedgerEntry.objects.filter(funding=funding).update(state=LedgerEntry.CANCELLED)
                task.compensate(scope=scope)
                raise NonRetryable("the bank refuses a funding", safe_to_undo=True) from exc
        return account


def _release(account: str, funding: Funding, key: str) -> dict[str, Any]:
    entry, _ = LedgerEntry.objects.get_or_create(funding=funding)
    reference = bank.release(account, str(funding.amount), key)
    return {"entry": entry.pk, "reference": reference}
