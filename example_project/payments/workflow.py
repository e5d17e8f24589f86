"""Open an account, then release its fundings one by one: resumable at every line.

The process may end anywhere. The next run takes the lock (when the lease of the one that was killed
is over), skips what is recorded, and goes on. If the message is given up, what was released is
taken back, the last funding first.
"""

from __future__ import annotations

from typing import Any

from . import bank, tasks
from .models import Application, Funding, LedgerEntry


def fund(task: Any, application_id: int) -> str:
    """Return the number of the account."""
    # Two messages for one application are one workflow: they share its lock, steps and keys.
    with task.workflow(f"application:{application_id}") as work:
        application = Application.objects.get(pk=application_id)
        account: str = work.step(
            "account", bank.open_account, application.customer, key=work.key("account")
        )
        Application.objects.filter(pk=application_id).update(account=account)
        for funding in application.fundings.order_by("pk"):
            name = f"release {funding.pk}"
            try:
                work.step(
                    name,
                    _release,
                    account,
                    funding,
                    key=work.key(name),
                    confirm=tasks.post_entry.s(),
                    undo=tasks.take_back.s(
                        account, funding.pk, str(funding.amount), work.key(name)
                    ),
                )
            except bank.BankSaysNo:
                # The message is given up, so all that was released is taken back.
                LedgerEntry.objects.filter(funding=funding).update(state=LedgerEntry.CANCELLED)
                raise
        return account


def _release(account: str, funding: Funding, key: str) -> dict[str, Any]:
    entry, _ = LedgerEntry.objects.get_or_create(funding=funding)
    reference = bank.release(account, str(funding.amount), key)
    return {"entry": entry.pk, "reference": reference}
