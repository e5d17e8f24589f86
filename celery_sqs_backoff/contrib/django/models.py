"""The table behind the store ``"django"``: see :mod:`celery_sqs_backoff.safe.stores.django`."""

from __future__ import annotations

from django.db import models  # type: ignore[import-untyped]

__all__ = ["Record"]


class Record(models.Model):  # type: ignore[misc]
    """One record: what a guard, a lock, a step or a key has to remember, until it ends."""

    key = models.CharField(max_length=255, primary_key=True)
    value = models.TextField()
    expires_at = models.DateTimeField(db_index=True)

    class Meta:
        verbose_name = "record"

    def __str__(self) -> str:
        return str(self.key)
