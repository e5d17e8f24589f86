"""Try the installed package without extras. ``tox -e bare`` and ``make release-check`` run this.

It needs nothing but the package and its requirements. So it is a program, and no test for pytest.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

#: Libraries of extras. If one of them is installed, the checks would prove nothing.
LIBRARIES = ("django", "redis", "matplotlib", "prometheus_client", "moto", "pytest")

#: Modules that can be imported only if the library of their extra is installed.
OF_AN_EXTRA = ("celery_sqs_backoff.contrib.django.", "celery_sqs_backoff.testing")

#: For each extra, code that needs it. The check runs each of them in a process of its own.
USES = {
    "testing": "import celery_sqs_backoff.testing",
    "redis": "from celery_sqs_backoff.store.settings import open_store; open_store('redis://h')",
    "django": "from celery_sqs_backoff.store.settings import open_store; open_store('django')",
    "plot": "from pathlib import Path; from celery_sqs_backoff.simulate.results import plot;"
    " plot([], '', Path('outage.svg'))",
}

#: The app of a user, for the command that needs an app.
APP = """
from celery import Celery

app = Celery("bare", broker="sqs://", task_cls="celery_sqs_backoff:SQSBackoffTask")
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-I", *words], capture_output=True, text=True)


def check_imports() -> int:
    """Import each module that needs no extra, and return their number."""
    package = importlib.import_module("celery_sqs_backoff")
    assert "site-packages" in str(package.__file__), package.__file__
    walked = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    needed = [each.name for each in walked if not each.name.startswith(OF_AN_EXTRA)]
    for name in needed:
        importlib.import_module(name)
    return len(needed)


def check_sentences() -> None:
    """Run code that needs a missing extra. Check that the error says which extra to install."""
    for extra, code in USES.items():
        said = run("-c", code).stderr.strip().rpartition("\n")[2]
        assert f"pip install 'celery-sqs-backoff[{extra}]'" in said, (extra, said)
        assert "ModuleNotFoundError" not in said, (extra, said)


def check_commands() -> int:
    """Ask each command for its help, and run ``sqs-simulate``. Return the number of commands."""
    celery = str(Path(sys.executable).with_name("celery"))
    commands = [each.name for each in entry_points(group="celery.commands") if "sqs" in each.name]
    for name in commands:
        shown = subprocess.run([celery, name, "--help"], capture_output=True, text=True)
        assert shown.returncode == 0, (name, shown.stderr)
        assert f"celery {name}" in shown.stdout, (name, shown.stdout)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "bare_app.py").write_text(APP)
        outage = [celery, "-A", "bare_app", "sqs-simulate", "--outage", "1m", "--json"]
        shown = subprocess.run(outage, cwd=folder, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)
    return len(commands)


def main() -> None:
    """Run all checks. The first check that fails ends the program."""
    present = [name for name in LIBRARIES if find_spec(name)]
    assert not present, f"not bare: {', '.join(present)}"
    modules = check_imports()
    check_sentences()
    commands = check_commands()
    print(f"bare: {modules} modules, {commands} commands, {len(USES)} missing extras")


if __name__ == "__main__":
    main()
