"""The public names of the package, and what its modules may import."""

import subprocess
import sys

import celery_sqs_backoff

RETRY = ["retry.budget", "retry.decision", "retry.outcomes", "retry.policies"]
PURE = [
    "provider.gate",
    "provider.rate",
    "provider.settings",
    *RETRY,
    "sqs.dead_letter",
    "sqs.delivery",
    "sqs.limits",
]

#: A program that imports some of our modules, and fails if they import a forbidden package. An
#: empty package stands in for ours, because our ``__init__`` imports too much.
IMPORT = """
import importlib.util, sys, types
for name in {forbidden!r}:
    sys.modules[name] = None
package = types.ModuleType("celery_sqs_backoff")
package.__path__ = [{path!r}]
sys.modules["celery_sqs_backoff"] = package
for module in {modules!r}:
    __import__(f"celery_sqs_backoff.{{module}}")
"""


def import_without(modules, *forbidden):
    path = celery_sqs_backoff.__path__[0]
    code = IMPORT.format(modules=modules, forbidden=forbidden, path=path)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_all():
    """``__all__`` lists each public name, and is sorted."""
    public = {
        name
        for name, value in vars(celery_sqs_backoff).items()
        if not name.startswith("_")
        and str(getattr(value, "__module__", "")).startswith("celery_sqs_backoff.")
    }
    public.add("redrive")  # imported only when it is used
    assert public == set(celery_sqs_backoff.__all__)
    assert celery_sqs_backoff.__all__ == sorted(celery_sqs_backoff.__all__)


def test_boto3_at_import():
    """Importing the package does not import boto3."""
    code = "import celery_sqs_backoff, sys; sys.exit('boto3' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_boto3_in_commands():
    """Our commands do not import boto3 when Celery loads them.

    ``celery`` loads all commands, even to start a worker.
    """
    code = """
import sys
from importlib.metadata import entry_points
for each in entry_points(group="celery.commands"):
    if each.value.startswith("celery_sqs_backoff."):
        each.load()
assert "celery_sqs_backoff.commands.status" in sys.modules
sys.exit("boto3" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_redrive_is_function():
    """``from celery_sqs_backoff import redrive`` gives the function, not the subpackage.

    This also holds if a module of the subpackage ``redrive`` was imported before.
    """
    code = """
import celery_sqs_backoff.redrive.look
from celery_sqs_backoff import redrive
from celery_sqs_backoff.redrive import peek
assert callable(redrive) and callable(peek), redrive
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pure_modules():
    """The modules in ``PURE`` import neither Celery nor boto3 nor Django."""
    done = import_without(PURE, "celery", "kombu", "billiard", "boto3", "botocore", "django")
    assert done.returncode == 0, done.stderr


def test_decisions_without_sqs():
    """The modules in ``RETRY``, which decide about retries, import nothing of SQS."""
    done = import_without(RETRY, "celery_sqs_backoff.sqs", "celery", "boto3")
    assert done.returncode == 0, done.stderr


def test_core_without_extras():
    """A worker imports neither Django nor the libraries for tests."""
    done = import_without(["worker.step"], "django", "moto", "pytest")
    assert done.returncode == 0, done.stderr


def test_blocker():
    """``import_without`` fails if a module imports a forbidden package."""
    assert import_without(["task.base"], "celery").returncode != 0
