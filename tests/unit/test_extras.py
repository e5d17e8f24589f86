"""The libraries that the package imports: its requirements, and those of extras."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from celery.exceptions import ImproperlyConfigured

import celery_sqs_backoff
from celery_sqs_backoff.simulate.results import plot
from celery_sqs_backoff.store.settings import open_store
from tests import bare, release

ROOT = Path(celery_sqs_backoff.__file__).parent

REQUIRED = {"billiard", "boto3", "botocore", "celery", "click", "kombu"}

FOR_TYPES = {"mypy_boto3_sqs", "typing_extensions"}

#: The libraries of our extras. Each has the parts of the package that may import it.
EXTRAS = {
    "django": ("contrib", "store", "commands"),
    "matplotlib": ("simulate",),
    "moto": ("testing.py",),
    "opentelemetry": ("task",),  # imported only if the user's program has loaded it
    "prometheus_client": ("observe", "worker"),
    "pytest": ("testing.py",),
    "redis": ("store",),
}


def libraries(path):
    """Yield the libraries that a module imports, also inside of functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)


def test_libraries():
    """The package imports only its requirements, and libraries of extras in the listed parts.

    A user who has not asked for an extra does not have its library.
    """
    known = sys.stdlib_module_names | REQUIRED | {"celery_sqs_backoff"} | FOR_TYPES
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0]
        for library in set(libraries(path)) - known:
            assert room in EXTRAS.get(library, ()), f"{library} in {path}"


@pytest.mark.parametrize(
    ("library", "extra", "use"),
    [
        ("redis", "redis", lambda: open_store("rediss://127.0.0.1:1/9")),
        ("django", "django", lambda: open_store("django://nowhere")),
        ("matplotlib.figure", "plot", lambda: plot([], "", Path("outage.svg"))),
    ],
)
def test_missing_library(monkeypatch, library, extra, use):
    """If the library of an extra is missing, the error says which extra to install."""
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises((ImproperlyConfigured, ValueError)) as caught:
        use()
    assert f"pip install 'celery-sqs-backoff[{extra}]'" in str(caught.value)


def test_missing_pytest():
    """If pytest is missing, the error of our ``testing`` module says which extra to install."""
    code = "import sys; sys.modules['pytest'] = None; import celery_sqs_backoff.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'celery-sqs-backoff[testing]'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("code", [*bare.USES.values(), *release.USES.values()])
def test_names_of_release_check(code):
    """The programs that try the built wheel with each extra import names that exist."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), "<uses>", "exec"), {})
