"""Set Django up once per process, and add the databases that tests need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

APPS = ["celery_sqs_backoff.contrib.django"]


def set_up() -> None:
    """Configure Django, unless an earlier test has done so."""
    import django
    import pymysql
    from django.conf import settings

    pymysql.version_info = (2, 2, 7, "final", 0)  # Django requires this version of mysqlclient
    pymysql.install_as_MySQLdb()

    if not settings.configured:
        settings.configure(INSTALLED_APPS=APPS, DATABASES={}, USE_TZ=True, SECRET_KEY="test")
        django.setup()


def add_database(alias: str, database: dict[str, Any]) -> None:
    """Add a database to Django's settings under this alias."""
    from django.db import connections

    set_up()
    connections.settings[alias] = connections.configure_settings(
        {"default": database, alias: database}
    )[alias]


def migrate(alias: str) -> None:
    from django.core.management import call_command

    call_command("migrate", "celery_sqs_backoff", database=alias, verbosity=0)


def close(alias: str) -> None:
    from django.db import connections

    connections[alias].close()


def sqlite(path: Path) -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(path),
        "OPTIONS": {"timeout": 20, "transaction_mode": "IMMEDIATE"},
    }


def postgresql(name: str) -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "HOST": "127.0.0.1",
        "USER": "postgres",
    }


def mariadb(name: str, socket: str, *, hours_ahead: int = 2) -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.mysql",
        "NAME": name,
        "USER": "root",
        "OPTIONS": {
            "unix_socket": socket,
            "charset": "utf8mb4",
            "init_command": f"SET time_zone='+0{hours_ahead}:00'",
        },
    }
