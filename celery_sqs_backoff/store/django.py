"""Records in a table of a Django project. The database's clock decides when one ends.

(SQLite has none of its own: there it is the machine's, on which all its users are.) Each change is
one statement in autocommit, so it is committed when it returns; see ``statements``. What has ended
is removed by ``manage.py sqs_backoff_clear_expired``, to be run daily.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

from . import statements
from .errors import StoreRefused, StoreUnavailable

#: add() finds a record that is gone when it looks at it: it tries again, so often.
_TRIES = 100

#: Refusals of a connection: numbers of MySQL's, texts of PostgreSQL's.
_REFUSALS = {1044, 1045, 1049, 1142}
_REFUSAL_TEXTS = ("authentication failed", "does not exist")

T = TypeVar("T")

_HASHED = re.compile(r"[a-z-]{1,20}:[0-9a-f]{64}")


class DjangoStore:
    """Records in the table of the app ``celery_sqs_backoff.contrib.django``.

    Keys and values are compared by their hashes: a collation that ignores case, accents or trailing
    spaces, as those of MySQL and MariaDB do, would confuse two of them.

    Arguments:
        using: alias of the database in ``DATABASES``.

    Raises:
        StoreInTransaction: (its methods) the alias is inside a transaction, whose rollback would
            take the record with it. The transaction around each test of Django's ``TestCase`` does
            not count.
    """

    def __init__(self, using: str = "default") -> None:
        self._using = using

    def add(self, key: str, value: str, ttl: float) -> str | None:
        for _ in range(_TRIES):
            if self._ask(partial(self._add, _key(key), _value(value), timedelta(seconds=ttl))):
                return None
            if (there := self.get(key)) is not None:
                return there
        raise StoreUnavailable("Django: the record comes and goes")

    def get(self, key: str) -> str | None:
        def get(records: Any, now: Any) -> str | None:
            there = records.filter(key=_key(key), expires_at__gt=now)
            value: str | None = there.values_list("value", flat=True).first()
            return value

        return self._ask(get)

    def replace(self, key: str, old: str, new: str, ttl: float | None) -> bool:
        def replace(records: Any, now: Any) -> int:
            end = {} if ttl is None else {"expires_at": now + timedelta(seconds=ttl)}
            there = records.filter(key=_key(key), digest=_digest(old), expires_at__gt=now)
            return int(there.update(**_value(new), **end))

        # MySQL counts changed rows, not those found: old and new may be the same.
        return bool(self._ask(replace)) or (old == new and self.get(key) == old)

    def delete(self, key: str, old: str) -> bool:
        def delete(records: Any, now: Any) -> int:
            # Not delete(): with a receiver of pre_delete in the project it would first select, and
            # then delete by key alone.
            ours = records.filter(key=_key(key), digest=_digest(old), expires_at__gt=now)
            return int(ours._raw_delete(self._using))

        return bool(self._ask(delete))

    def remove_expired(self) -> int:
        """Delete what has ended; return how many records that were."""
        return self._ask(
            lambda records, now: int(records.filter(expires_at__lte=now)._raw_delete(self._using))
        )

    def check_settings(self) -> None:
        """Refuse an app or an alias that is missing from the settings. Asks nobody.

        Raises:
            ValueError: says which, and what to do.
        """
        from django.apps import apps  # type: ignore[import-untyped]
        from django.conf import settings  # type: ignore[import-untyped]
        from django.db import connections  # type: ignore[import-untyped]

        if not (settings.configured or os.environ.get("DJANGO_SETTINGS_MODULE")):
            raise ValueError("set DJANGO_SETTINGS_MODULE: the store needs Django's settings")
        if not apps.is_installed("celery_sqs_backoff.contrib.django"):
            raise ValueError("add 'celery_sqs_backoff.contrib.django' to INSTALLED_APPS")
        if self._using not in connections.settings:
            known = ", ".join(sorted(connections.settings)) or "none"
            raise ValueError(f"unknown database alias {self._using!r}: DATABASES has {known}")

    def check_table(self) -> None:
        """Refuse a database without the table.

        Raises:
            ValueError: what to do.
            StoreUnavailable: the database did not answer.
        """
        from django.db import DatabaseError, InterfaceError, connections

        from ..contrib.django.models import Record

        try:
            tables = connections[self._using].introspection.table_names()
        except (DatabaseError, InterfaceError) as exc:
            raise _kind_of(exc)(f"Django: {type(exc).__name__}") from exc
        if Record._meta.db_table not in tables:
            raise ValueError(
                f"the table {Record._meta.db_table!r} is missing: {self._how_to_make(Record)}"
            )

    def _how_to_make(self, record: Any) -> str:
        """What ``migrate`` needs to make the table: it notes as done what a router has refused."""
        from django.db import connections, router
        from django.db.migrations.recorder import (  # type: ignore[import-untyped]
            MigrationRecorder,
        )

        label = record._meta.app_label
        steps = [f"manage.py migrate {label} --database {self._using}"]
        noted = MigrationRecorder(connections[self._using]).applied_migrations()
        if any(app == label for app, _ in noted):
            steps.insert(0, f"manage.py migrate {label} zero --fake --database {self._using}")
        if not router.allow_migrate_model(self._using, record):
            refused = f"let allow_migrate() of DATABASE_ROUTERS return True for {label!r} on"
            steps.insert(0, f"{refused} {self._using!r}")
        return ", then ".join(steps)

    def _add(self, at: str, new: dict[str, str], ttl: timedelta, records: Any, now: Any) -> bool:
        from django.db import IntegrityError, connections, transaction

        if records.filter(key=at, expires_at__lte=now).update(**new, expires_at=now + ttl):
            return True
        try:
            if connections[self._using].in_atomic_block:  # only a test's: see _ask
                with transaction.atomic(using=self._using):  # keeps it usable
                    records.create(key=at, **new, expires_at=now + ttl)
            else:
                records.create(key=at, **new, expires_at=now + ttl)
        except IntegrityError:
            return False
        return True

    def _ask(self, statement: Callable[[Any, Any], T]) -> T:
        """Make a statement, given the table and what the database is to take for now.

        Made again, it may have taken effect before: see ``Store``.
        """
        from django.db import DatabaseError, InterfaceError

        from ..contrib.django.models import Record, UTCNow

        refusal = (
            f"The store's database alias {self._using!r} is inside a transaction, whose rollback"
            " would take back what has been recorded: leave the atomic block first, or give the"
            " store a connection of its own: a copy of the alias in DATABASES, say 'records', and"
            " the store 'django://records'"
        )
        ask = partial(statement, Record.objects.using(self._using), UTCNow())
        try:
            return statements.make(self._using, ask, refusal=refusal)
        except (DatabaseError, InterfaceError) as exc:
            raise _kind_of(exc)(f"Django: {type(exc).__name__}") from exc


def _kind_of(exc: Exception) -> type[StoreUnavailable]:
    """Tell a database that refuses (no right, table or password) from one that is away."""
    from django.db import ProgrammingError

    is_refused = isinstance(exc, ProgrammingError) or not _REFUSALS.isdisjoint(exc.args[:1])
    is_refused = is_refused or any(text in str(exc) for text in _REFUSAL_TEXTS)
    return StoreRefused if is_refused else StoreUnavailable


def _key(key: str) -> str:
    """The keys of ``key_of`` as they are; any other hashed."""
    return key if _HASHED.fullmatch(key) else f"raw:{_digest(key)}"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _value(value: str) -> dict[str, str]:
    return {"value": value, "digest": _digest(value)}
