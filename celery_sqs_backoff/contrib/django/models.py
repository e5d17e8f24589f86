"""The tables of the store ``"django://"`` and of the outbox."""

from __future__ import annotations

from typing import Any

from django.db import models  # type: ignore[import-untyped]
from django.db.models.functions import Now  # type: ignore[import-untyped]


class UTCNow(Now):  # type: ignore[misc]
    """The database's current time, in UTC also on MySQL and MariaDB.

    On these two, Django's own ``Now`` returns the session's local time. That time shifts with
    daylight saving time, and differs between sessions with different ``time_zone``.
    """

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)


class Record(models.Model):  # type: ignore[misc]
    """A record of the store, for example of a guard or a lock. It expires at ``expires_at``."""

    key = models.CharField(max_length=100, primary_key=True)
    value = models.TextField()
    #: SHA-256 of the value. Queries compare the hash, because collations may ignore case.
    digest = models.CharField(max_length=64)
    expires_at = models.DateTimeField(db_index=True)

    class Meta:
        verbose_name = "record"

    def __str__(self) -> str:
        return str(self.key)


class OutboxCall(models.Model):  # type: ignore[misc]
    """A durable call of a task, until the call is sent. See the module ``outbox``."""

    id = models.BigAutoField(primary_key=True)
    task = models.CharField(max_length=255)
    #: Arguments and options as JSON. They are user data, like the rest of the database.
    call = models.TextField()
    #: Before this time, only the process that has written or claimed the call sends it.
    send_at = models.DateTimeField(db_index=True)
    #: Number of claims. A process claims the call by writing the next number.
    claims = models.PositiveIntegerField(default=0)

    class Meta:
        verbose_name = "outbox call"

    def __str__(self) -> str:
        return f"{self.task} {self.pk}"
