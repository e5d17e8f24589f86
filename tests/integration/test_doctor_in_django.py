"""The doctor's rules as Django system checks, in the example project."""

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from celery_sqs_backoff.commands import exit_codes
from tests.support.manage import run_manage

Manage = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def manage(sqs_endpoint, queue, tmp_path):
    def run(*arguments, endpoint=sqs_endpoint, settings="example_project.settings"):
        return run_manage(
            *arguments,
            endpoint=endpoint,
            queue=queue,
            DJANGO_SETTINGS_MODULE=settings,
            PYTHONPATH=str(tmp_path),
        )

    return run


def test_plain_check(manage):
    """A plain ``manage.py check`` calls no server."""
    done = manage("check", "--tag", "celery_sqs_backoff", endpoint="http://127.0.0.1:1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "setting",
    [
        "CELERY_SQS_BACKOFF = {'retryfor': 3600}",
        "CELERY_BROKER_TRANSPORT_OPTIONS = ['us-east-1']",
    ],
    ids=["unknown option", "not a mapping"],
)
def test_invalid_settings(manage, tmp_path, setting):
    """The checks report an error for settings that no worker can use."""
    text = f"from example_project.settings import *\n{setting}\n"
    (tmp_path / "wrong_settings.py").write_text(text)
    done = manage("check", settings="wrong_settings")
    assert "(celery_sqs_backoff.E031)" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode != 0
    done = manage("sqs_doctor", "--offline", settings="wrong_settings")
    assert done.returncode == exit_codes.USAGE
    assert "cannot load the app" in done.stderr


def test_failing_module(manage, tmp_path):
    """If a module of tasks raises an error, the checks name its file and line."""
    (tmp_path / "wrong_tasks.py").write_text("def of(key):\n    return {}[key]\n\nof('a')\n")
    text = "from example_project.settings import *\nCELERY_IMPORTS = ['wrong_tasks']\n"
    (tmp_path / "wrong_settings.py").write_text(text)
    place = f"KeyError: 'a' ({tmp_path / 'wrong_tasks.py'}, line 4)"
    assert place in manage("check", settings="wrong_settings").stderr
    assert place in manage("sqs_doctor", "--offline", settings="wrong_settings").stderr


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("import a_library_of_the_workers", "ModuleNotFoundError: No module named 'a_library_of"),
        ("import sys\nsys.exit('no key')", "SystemExit: no key"),
    ],
    ids=["library", "exit"],
)
def test_migrate_without_tasks(manage, tmp_path, module, said):
    """``migrate`` works even if tasks cannot be imported. The checks only warn.

    ``migrate`` runs the checks, perhaps in an image without the libraries of the workers.
    """
    (tmp_path / "workers_tasks.py").write_text(f"{module}\n")
    (tmp_path / "migrating_settings.py").write_text(
        "from example_project.settings import *\nCELERY_IMPORTS = ['workers_tasks']\n"
        f"DATABASES = {{'default': {{'ENGINE': 'django.db.backends.sqlite3',"
        f" 'NAME': {str(tmp_path / 'new.sqlite3')!r}}}}}\n"
    )
    done = manage("migrate", settings="migrating_settings")
    assert done.returncode == 0, done.stderr
    assert "(celery_sqs_backoff.W032)" in done.stderr
    assert said in done.stderr


def test_modules_print_or_exit(manage, tmp_path):
    """The doctor's JSON has nothing that a module of tasks prints. A module that exits is named."""
    (tmp_path / "loud_tasks.py").write_text("print('loud')\n")
    (tmp_path / "ending_tasks.py").write_text("import sys\nsys.exit('no key')\n")
    for name in ("loud", "ending"):
        text = f"from example_project.settings import *\nCELERY_IMPORTS = ['{name}_tasks']\n"
        (tmp_path / f"{name}_settings.py").write_text(text)
    done = manage("sqs_doctor", "--offline", "--format", "json", settings="loud_settings")
    assert "findings" in json.loads(done.stdout)
    assert "loud" in done.stderr
    done = manage("sqs_doctor", "--offline", settings="ending_settings")
    assert done.returncode == exit_codes.USAGE
    assert "SystemExit: no key" in done.stderr


@pytest.fixture
def without_app(tmp_path):
    """Return a function that runs a command in a project that imports no Celery app."""
    (tmp_path / "bare_settings.py").write_text(
        "SECRET_KEY = 'x' * 60\n"
        "INSTALLED_APPS = ['celery_sqs_backoff.contrib.django']\n"
        "DATABASES = {'default': {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}}\n"
        "CELERY_BROKER_URL = 'sqs://'\n"
    )

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "django", *arguments],
            env=os.environ
            | {"DJANGO_SETTINGS_MODULE": "bare_settings", "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    "command", [["sqs_doctor"], ["sqs_doctor", "--offline"], ["sqs_status", "--json"]], ids=" ".join
)
def test_app_not_imported(without_app, command):
    """A command ends with an error if the project does not import its Celery app.

    Celery then uses a default app without tasks, and the doctor would find that all is well.
    """
    done = without_app(*command)
    assert (done.returncode, done.stdout) == (2, "")
    assert "the project's Celery app is not imported" in done.stderr


def test_check_of_missing_app(without_app):
    """The checks warn once if the project does not import its Celery app."""
    done = without_app("check", "--tag", "celery_sqs_backoff")
    assert done.stderr.count("(celery_sqs_backoff.") == 1
    assert "(celery_sqs_backoff.W035)" in done.stderr
    assert done.returncode == 0


def test_same_as_celery_command(manage, sqs, queue):
    """The Django command finds the same faults as Celery's."""
    sqs.set_queue_attributes(QueueUrl=queue.url, Attributes={"VisibilityTimeout": "0"})
    done = manage("sqs_doctor", "--format", "json")
    assert done.returncode == exit_codes.FOUND
    assert '"id": "E011"' in done.stdout
