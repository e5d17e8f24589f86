"""Records in a table of a Django project. The database's clock decides when one ends.

(SQLite has none of its own: there it is the machine's, on which all its users are.) Each change is
one statement in autocommit, so it is committed when it returns. What has ended is removed by
``manage.py sqs_backoff_clear_expired``, to be run daily.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ..errors import StoreInTransaction, StoreUnavailable

__all__ = ["DjangoStore"]

#: add() finds a record that is gone when it looks at it: it tries again, so often.
_TRIES = 100


class DjangoStore:
    """Records in the table of the app ``celery_sqs_backoff.contrib.django``.

    Arguments:
        using: alias of the database in ``DATABASES``.

    Raises:
        StoreInTransaction: (its methods) the alias is inside a transaction. Its rollback would take
            the record of what has been done with it.
    """

    def __init__(self, using: str = "default") -> None:
        self._using = using

    def add(self, key: str, value: str, ttl: float) -> str | None:
        from django.db import IntegrityError  # type: ignore[import-untyped]

        for _ in range(_TRIES):
            with self._records() as (records, now):
                ended = records.filter(key=key, expires_at__lte=now)
                if ended.update(value=value, expires_at=now + timedelta(seconds=ttl)):
                    return None
                try:
                    records.create(key=key, value=value, expires_at=now + timedelta(seconds=ttl))
                except IntegrityError:
                    pass
                else:
                    return None
            if (there := self.get(key)) is not None:
                return there
        raise StoreUnavailable("Django: the record comes and goes")

    def get(self, key: str) -> str | None:
        with self._records() as (records, now):
            value: str | None = (
                records.filter(key=key, expires_at__gt=now).values_list("value", flat=True).first()
            )
        return value

    def replace(self, key: str, old: str, new: str, ttl: float) -> bool:
        changed = 0
        with self._records() as (records, now):
            changed = records.filter(key=key, value=old, expires_at__gt=now).update(
                value=new, expires_at=now + timedelta(seconds=ttl)
            )
        return bool(changed)

    def delete(self, key: str, old: str) -> bool:
        deleted = 0
        with self._records() as (records, now):
            # Not delete(): with a receiver of pre_delete in the project it would first select, and
            # then delete by key alone.
            ours = records.filter(key=key, value=old, expires_at__gt=now)
            deleted = ours._raw_delete(self._using)
        return bool(deleted)

    def remove_expired(self) -> int:
        """Delete what has ended; return how many records that were."""
        deleted = 0
        with self._records() as (records, now):
            deleted = records.filter(expires_at__lte=now)._raw_delete(self._using)
        return int(deleted)

    @contextmanager
    def _records(self) -> Iterator[tuple[Any, Any]]:
        """The table, and what the database is to take for now."""
        from django.db import DatabaseError, InterfaceError, connections
        from django.db.models.functions import Now  # type: ignore[import-untyped]

        from ...contrib.django.models import Record

        connection = connections[self._using]
        try:
            if connection.in_atomic_block or not connection.get_autocommit():
                raise StoreInTransaction(
                    f"The store's database alias {self._using!r} is inside a transaction, whose"
                    " rollback would take back what has been recorded: leave the atomic block"
                    " first, or give the store a connection of its own: a copy of the alias in"
                    " DATABASES, say 'records', and the store 'django://records'"
                )
            yield Record.objects.using(self._using), Now()
        except (DatabaseError, InterfaceError) as exc:
            # Celery closes what is unusable between tasks; a retry within this one should not
            # have to wait for that.
            connection.close_if_unusable_or_obsolete()
            raise StoreUnavailable(f"Django: {type(exc).__name__}") from exc
