"""The store in Django: system checks, the doctor, commands and connections."""

from __future__ import annotations

import os
import subprocess
import sys
from io import StringIO
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, _state

from celery_sqs_backoff.doctor import ProjectFacts, examine
from celery_sqs_backoff.doctor.look import facts_of_app
from celery_sqs_backoff.safe import RecordRejected
from celery_sqs_backoff.store.check import StoreStep
from celery_sqs_backoff.store.records import Records
from celery_sqs_backoff.store.settings import open_store, records_of
from tests.support.processes import free_port

from .django_app import project

project.set_up()

from celery_sqs_backoff.contrib.django import checks  # noqa: E402


@pytest.fixture
def alias(tmp_path):
    name = f"checked_{uuid4().hex[:8]}"  # a new name, because Django keeps a name's first settings
    project.add_database(name, project.sqlite(tmp_path / "records.sqlite3"))
    yield name
    project.close(name)


@pytest.fixture
def app():
    before = _state._tls.current_app
    app = Celery("checked", broker="memory://", set_as_current=False)
    app.finalize()
    app.set_current()
    yield app
    _state._tls.current_app = before
    app.close()


def of_store(check: Any) -> list[Any]:
    """Return the messages of a check about the store."""
    return [message for message in check(None) if message.obj == "sqs_backoff['store']"]


def asked(app: Any) -> list[tuple[str, str]]:
    """Return what the doctor finds about the store when it calls the store."""
    facts = ProjectFacts(app=facts_of_app(app, live=True))
    return [(f.id, f.evidence) for f in examine(facts) if f.subject == "sqs_backoff['store']"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"store": "django://recrods"}, "recrods"),
        ({"store": "redis://:hunter2/x@host:6379/0"}, "percent-encoded"),
        ({"store": "redis://host:port/0"}, "port"),
        ({"store": "dynamodb://"}, "dynamodb URL"),
        ({"store": "memory://", "secret": []}, "secret"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_store(app, settings, why):
    """Django's system check reports a store that cannot work, without its password."""
    app.conf.sqs_backoff = settings
    [error] = of_store(checks.check_app)
    assert error.id == "celery_sqs_backoff.E023"
    assert why in error.msg
    assert "hunter2" not in error.msg


def test_missing_library(app, monkeypatch):
    """If the store's library is missing, Django's system check passes, and the doctor reports it.

    ``migrate`` runs the system checks, perhaps in an image without the libraries of the workers.
    """
    monkeypatch.setitem(sys.modules, "redis", None)
    app.conf.sqs_backoff = {"store": "redis://127.0.0.1:1/9"}  # a URL that no test has used yet
    assert of_store(checks.check_app) == []
    [(rule, why)] = asked(app)
    assert rule == "E023"
    assert "redis is not installed" in why


def test_app_not_installed(app, alias, monkeypatch):
    """Django's system check reports a store whose app is not in INSTALLED_APPS."""
    from django.apps import apps

    monkeypatch.setattr(apps, "is_installed", lambda name: False)
    app.conf.sqs_backoff = {"store": f"django://{alias}"}
    [error] = of_store(checks.check_app)
    assert "INSTALLED_APPS" in error.msg


def test_check_leaves_no_connection(app, alias):
    """The check of the store at a worker's start leaves no open connection.

    Pool processes would inherit it, and read each other's responses.
    """
    from django.db import connections

    project.migrate(alias)
    app.conf.sqs_backoff = {"store": f"django://{alias}"}
    worker = SimpleNamespace(app=app, pool_cls="prefork")
    kept = connections[alias].connection
    assert kept is not None
    StoreStep.create(None, worker)
    assert connections[alias].connection is kept, "it must not close a connection of the user"
    project.close(alias)
    StoreStep.create(None, worker)
    assert connections[alias].connection is None


def test_store_asked(app, alias):
    """The doctor calls the store, and reports one that has no table or cannot be reached."""
    app.conf.sqs_backoff = {"store": f"django://{alias}"}
    assert of_store(checks.check_app) == []
    [(rule, why)] = asked(app)
    assert rule == "E023"
    assert "manage.py migrate" in why
    project.migrate(alias)
    assert asked(app) == []
    app.conf.sqs_backoff = {"store": f"redis://:hunter2@127.0.0.1:{free_port()}/0"}
    [(rule, why)] = asked(app)
    assert rule == "E023"
    assert "hunter2" not in why


def test_unsigned_records(app, alias):
    """The doctor warns if records in a shared store are not signed.

    This happens in a project without a SECRET_KEY that does not set ``secret``.
    """
    from django.test import override_settings

    project.migrate(alias)
    app.conf.sqs_backoff = {"store": f"django://{alias}"}
    with override_settings(SECRET_KEY=""):
        assert of_store(checks.check_app) == []
        assert [rule for rule, _ in asked(app)] == ["W042"]
        app.conf.sqs_backoff = {"store": f"django://{alias}", "secret": "ours"}
        assert asked(app) == []


def test_secret_keys(app, alias):
    """A SECRET_KEY in bytes can sign records. An empty fallback key verifies no record.

    Django accepts keys in bytes. An empty key comes from an environment variable that is not set.
    """
    from django.test import override_settings

    project.migrate(alias)
    app.conf.sqs_backoff = {"store": f"django://{alias}"}
    with override_settings(SECRET_KEY=b"\xff"):
        assert asked(app) == []
        records_of(app).add("guard", "1", {"is": "signed"}, 60)
    with override_settings(SECRET_KEY="new", SECRET_KEY_FALLBACKS=[b"\xff", ""]):
        assert records_of(app).get("guard", "1") is not None
        store = open_store(f"django://{alias}")
        forger = Records(store, namespace=app.main, secrets=[""])
        forger.add("guard", "2", {"is": "forged"}, 60)
        with pytest.raises(RecordRejected):
            records_of(app).get("guard", "2")


def test_celery_command(tmp_path):
    """The ``celery`` command can read a store in Django.

    Unlike a worker and ``manage.py``, it must first set up Django, whose SECRET_KEY signs records.
    """
    (tmp_path / "shop").mkdir()
    database = project.sqlite(tmp_path / "shop.sqlite3")
    for name, text in {
        "__init__.py": "from .celery import app as celery_app",
        "celery.py": """import os
from celery import Celery
os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
""",
        "settings.py": f"""DATABASES = {{"default": {database!r}}}
INSTALLED_APPS = ["celery_sqs_backoff.contrib.django"]
SECRET_KEY = "test"
CELERY_SQS_BACKOFF = {{"store": "django"}}
""",
    }.items():
        (tmp_path / "shop" / name).write_text(text)

    def run(*arguments):
        paths = [str(tmp_path), *sys.path]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "DJANGO_SETTINGS_MODULE": "shop.settings",
        }
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.stdout + done.stderr

    run("-m", "django", "migrate", "-v0")
    run(
        "-c",
        "import django, shop\ndjango.setup()\n"
        "from celery_sqs_backoff.safe.lock import Lock\n"
        "from celery_sqs_backoff.store.settings import records_of\n"
        "Lock(records_of(shop.celery_app), 'order:7').acquire()",
    )
    shown = run("-m", "celery", "-A", "shop", "sqs-safe", "list", "order:7")
    assert shown.split() == ["lock", "held", "order:7"]


def test_clear_expired(app, alias):
    """``sqs_backoff_clear_expired`` removes ended records from the database of the store.

    If it used the default database, it would report "0 removed" every night.
    """
    from django.core.management import CommandError, call_command
    from django.db import connections

    project.migrate(alias)
    app.conf.sqs_backoff = {"store": f"django://{alias}"}
    open_store(f"django://{alias}").add("old", "value", -1)
    out = StringIO()
    call_command("sqs_backoff_clear_expired", stdout=out)
    assert out.getvalue() == "1 removed\n"
    with connections[alias].execute_wrapper(_away), pytest.raises(CommandError, match="not all"):
        call_command("sqs_backoff_clear_expired")
    app.conf.sqs_backoff = {"store": "memory://"}
    with pytest.raises(CommandError, match="not Django's database"):
        call_command("sqs_backoff_clear_expired")


def _away(*_: Any) -> Any:
    from django.db import OperationalError

    raise OperationalError("the server is away")
