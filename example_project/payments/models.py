"""Payment orders, and their entries in the books."""

from django.db import models


class Application(models.Model):
    """A customer wants an account, and fundings on it."""

    customer = models.CharField(max_length=200)
    account = models.CharField(max_length=64, blank=True)  # the bank's number of it


class Funding(models.Model):
    application = models.ForeignKey(Application, models.CASCADE, related_name="fundings")
    amount = models.DecimalField(max_digits=12, decimal_places=2)


class LedgerEntry(models.Model):
    """Posted when the bank has released the funding, cancelled when it has taken it back."""

    POSTED, CANCELLED = "posted", "cancelled"

    funding = models.OneToOneField(Funding, models.CASCADE, related_name="entry")
    state = models.CharField(max_length=10, default=POSTED)
    reference = models.CharField(max_length=64, blank=True)  # the bank's
