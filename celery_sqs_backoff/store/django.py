"""Keep records in a table of a Django project. The database's clock decides when a record ends.

SQLite has no server, so it uses the machine's clock, which all its users share. Each change is one
statement in autocommit, so the change is committed when the statement returns. Run
``manage.py sqs_backoff_clear_expired`` daily to delete ended records.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

from celery.exceptions import ImproperlyConfigured

from .connections import close, is_in_transaction
from .errors import StoreInTransaction, StoreRefused, StoreUnavailable

#: How often ``add()`` tries. It tries again if the existing record ends before it is read.
_ADDS = 100

#: How often a statement is tried. Each try after the first uses a new connection.
_TRIES = 5

#: Errors that waiting does not cure, such as a wrong password or a missing table. The codes are of
#: MySQL, the texts of PostgreSQL and SQLite.
_REFUSALS = {1044, 1045, 1049, 1142}
_REFUSAL_TEXTS = ("authentication failed", "does not exist", "no such table")

T = TypeVar("T")


class DjangoStore:
    """Records in the table of the app ``celery_sqs_backoff.contrib.django``.

    Keys and values are compared by their hashes, because collations of MySQL and MariaDB ignore
    case, accents or trailing spaces.

    Arguments:
        using: alias of the database in ``DATABASES``.

    Raises:
        StoreInTransaction: (its methods) the alias is inside a transaction. A rollback would
            undo the change of the record. The transaction around each test of Django's
            ``TestCase`` does not count.
    """

    def __init__(self, using: str = "default") -> None:
        self._using = using

    def add(self, key: str, value: str, ttl: float) -> str | None:
        for _ in range(_ADDS):
            if self._ask(partial(self._add, _key(key), _value(value), timedelta(seconds=ttl))):
                return None
            if (there := self.get(key)) is not None:
                return there
        raise StoreUnavailable("gave up after 100 conflicting writes by other runs")

    def get(self, key: str) -> str | None:
        there: list[str] = self._ask(
            lambda records, now: list(_present(records, now, key).values_list("value", flat=True))
        )
        return there[0] if there else None

    def replace(self, key: str, old: str, new: str, ttl: float | None) -> bool:
        def replace(records: Any, now: Any) -> Any:
            end = {} if ttl is None else {"expires_at": now + timedelta(seconds=ttl)}
            return _present(records, now, key, old).update(**_value(new), **end)

        # MySQL returns the number of changed rows. It is 0 if ``old`` and ``new`` are the same.
        return bool(self._ask(replace)) or (old == new and self.get(key) == old)

    def delete(self, key: str, old: str) -> bool:
        def delete(records: Any, now: Any) -> Any:
            # Django's ``delete()`` would not be atomic. If the project has a receiver of
            # ``pre_delete``, Django first selects the record, and then deletes it by its key alone.
            return _present(records, now, key, old)._raw_delete(self._using)

        return bool(self._ask(delete))

    def remove_expired(self) -> int:
        """Delete the records that have ended, and return their number."""
        return self._ask(
            lambda records, now: int(records.filter(expires_at__lte=now)._raw_delete(self._using))
        )

    def check_settings(self) -> None:
        """Refuse an app or an alias that is missing from the settings, without a query.

        Raises:
            ImproperlyConfigured: a setting is missing. The text names the remedy.
        """
        from django.apps import apps  # type: ignore[import-untyped]
        from django.conf import settings  # type: ignore[import-untyped]
        from django.db import connections  # type: ignore[import-untyped]

        why = None
        if not (settings.configured or os.environ.get("DJANGO_SETTINGS_MODULE")):
            why = "set DJANGO_SETTINGS_MODULE: the store needs Django's settings"
        elif not apps.is_installed("celery_sqs_backoff.contrib.django"):
            why = "add 'celery_sqs_backoff.contrib.django' to INSTALLED_APPS"
        elif self._using not in connections.settings:
            known = ", ".join(sorted(connections.settings)) or "none"
            why = f"unknown database alias {self._using!r}: DATABASES has {known}"
        if why is not None:
            raise ImproperlyConfigured(f"sqs_backoff['store']: {why}")

    def _add(self, at: str, new: dict[str, str], ttl: timedelta, records: Any, now: Any) -> bool:
        from django.db import IntegrityError, connections, transaction

        if records.filter(key=at, expires_at__lte=now).update(**new, expires_at=now + ttl):
            return True
        # ``_ask`` allows an open transaction only if a Django test has opened it. An error would
        # make this transaction unusable, so create the record in an inner block (a savepoint).
        is_in_test = connections[self._using].in_atomic_block
        atomic = transaction.atomic(using=self._using) if is_in_test else nullcontext()
        try:
            with atomic:
                records.create(key=at, **new, expires_at=now + ttl)
        except IntegrityError:
            return False
        return True

    def _ask(self, statement: Callable[[Any, Any], T]) -> T:
        """Call ``statement`` with the table and the database's clock.

        Try again if the database has rolled the statement back because of a concurrent statement,
        or if the connection is unusable. For example, the connection was idle for too long, or the
        server was restarted or has become a read-only replica. The first try may have taken effect
        (see ``Store``).
        """
        from django.db import DatabaseError, InterfaceError, connections

        from ..contrib.django.models import Record, UTCNow

        connection = connections[self._using]
        for tries_left in reversed(range(_TRIES)):
            try:
                if is_in_transaction(connection):  # connects, and fails if the server is down
                    raise StoreInTransaction(
                        f"the store's database alias {self._using!r} is inside a transaction, whose"
                        " rollback would undo the change of the record: leave the atomic block"
                        " first, or give the store an alias of its own, such as 'django://records'"
                    )
                return statement(Record.objects.using(self._using), UTCNow())
            except (DatabaseError, InterfaceError) as exc:
                if _is_refused(exc):
                    migrate = f"manage.py migrate celery_sqs_backoff --database {self._using}"
                    why = f"Django: {type(exc).__name__}; if the table is missing, run {migrate!r}"
                    raise StoreRefused(why) from exc
                is_away = connection.connection is None
                if is_away or connection.in_atomic_block or not tries_left:
                    raise StoreUnavailable(f"Django: {type(exc).__name__}") from exc
                close(connection)
        raise AssertionError("unreachable")


def _is_refused(exc: Exception) -> bool:
    """Return whether the database refuses the user (wrong password, missing right or table)."""
    from django.db import ProgrammingError

    is_known = not _REFUSALS.isdisjoint(exc.args[:1])
    is_known = is_known or any(text in str(exc) for text in _REFUSAL_TEXTS)
    return is_known or isinstance(exc, ProgrammingError)


def _present(records: Any, now: Any, key: str, value: str | None = None) -> Any:
    """Return the query for a record that has not ended. A given ``value`` must match."""
    there = records.filter(key=_key(key), expires_at__gt=now)
    return there if value is None else there.filter(digest=_digest(value))


def _key(key: str) -> str:
    """Return a key's kind and its hash. The kind helps operators who read the table."""
    return f"{key.partition(':')[0][:20]}:{_digest(key)}"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _value(value: str) -> dict[str, str]:
    return {"value": value, "digest": _digest(value)}
