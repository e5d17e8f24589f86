"""Applications for accounts, their fundings, and the entries in our ledger."""

from django.db import models


class Application(models.Model):
    """A customer's application for an account with fundings."""

    customer = models.CharField(max_length=200)
    account = models.CharField(max_length=64, blank=True)  # the account's number at the bank


class Funding(models.Model):
    application = models.ForeignKey(Application, models.CASCADE, related_name="fundings")
    amount = models.DecimalField(max_digits=12, decimal_places=2)


class LedgerEntry(models.Model):
    """An entry is posted when the bank releases the funding, and cancelled when it is undone."""

    POSTED, CANCELLED = "posted", "cancelled"

    funding = models.OneToOneField(Funding, models.CASCADE, related_name="entry")
    state = models.CharField(max_length=10, default=POSTED)
    reference = models.CharField(max_length=64, blank=True)  # the bank's reference of the release
