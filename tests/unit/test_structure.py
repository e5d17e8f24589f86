"""The imports between the parts of the package point one way, and there are no cycles.

A room is a part of the package: a folder or module right below ``celery_sqs_backoff``.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import celery_sqs_backoff

ROOT = Path(celery_sqs_backoff.__file__).parent
PACKAGE = ROOT.name

#: The rooms from which each room may import, besides itself. Add a new room here.
MAY_IMPORT = {
    "text": set(),
    "threads": set(),
    "traces": set(),
    "units": {"retry"},
    "version": set(),
    "signals": set(),
    "retry": {"text"},
    "sqs": {"retry", "text", "threads", "traces"},
    "classifiers": {"retry", "sqs", "text", "traces"},
    "foreign": {"text"},
    # The Django store has its model in contrib.django.
    "store": {"retry", "text", "threads", "contrib"},
    # SQSBackoffTask inherits ``delay_on_commit`` from contrib.django.
    "safe": {"retry", "store", "task", "text", "contrib"},
    "provider": {"retry", "sqs", "store", "signals", "text", "units"},
    "task": {"retry", "sqs", "store", "signals", "provider", "text", "threads"},
    "observe": {"retry", "sqs", "store", "signals", "text", "threads", "units"},
    "worker": {
        *("retry", "sqs", "store", "task", "signals", "provider", "foreign", "observe"),
        *("doctor", "text", "threads"),
    },
    "redrive": {"retry", "sqs", "signals", "text", "threads", "units"},
    "simulate": {"retry", "sqs", "provider", "task", "text", "units"},
    "doctor": {"retry", "sqs", "store", "task", "units"},
    "commands": {
        *("retry", "sqs", "redrive", "safe", "provider", "simulate", "task", "version", "doctor"),
        *("observe", "store", "text", "units"),
    },
    "contrib": {
        "retry",
        "sqs",
        "redrive",
        "store",
        "safe",
        "provider",
        "simulate",
        "task",
        "commands",
        "doctor",
        "text",
    },
    "provider_proxy": set(),
    "testing": {"retry", "sqs", "store", "task", "provider_proxy", "text"},
}


@cache
def modules() -> dict[str, Path]:
    """Return the path of each module, by its dotted name below the package."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "migrations" not in parts:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(module: str, *, for_types: bool = True) -> frozenset[str]:
    """Return the modules of the package that a module imports, also inside of functions.

    Without ``for_types``, imports under ``if TYPE_CHECKING`` are left out.
    """
    path = modules()[module]
    is_package = path.name == "__init__.py"
    home = module.split(".") if module else []
    found = set()
    tree = ast.parse(path.read_text())
    if not for_types:
        guards = [
            n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)
        ]
        tree.body = [node for node in tree.body if node not in guards]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                up = node.level - is_package
                base = home[: len(home) - up] if up else home
            elif (node.module or "").split(".")[0] == PACKAGE:
                base = []
            else:
                continue
            tail = (node.module or "").split(".") if node.module else []
            tail = tail[1:] if not node.level else tail
            source = ".".join([*base, *tail])
            for alias in node.names:
                name = f"{source}.{alias.name}".strip(".")
                found.add(name if name in modules() else source)
    return frozenset(found & modules().keys()) - {module}


def test_import_direction():
    """Each room imports only from the rooms that ``MAY_IMPORT`` allows."""
    wrong = {}
    for module in filter(None, modules()):
        room = module.split(".")[0]
        rooms = {name.split(".")[0] for name in imports(module) if name} - {room}
        if not rooms <= MAY_IMPORT[room]:
            wrong[module] = rooms - MAY_IMPORT[room]
    assert wrong == {}


def test_import_cycles():
    """No module imports itself through other modules.

    Imports for types alone are allowed, because they do not happen at run time.
    """
    state = {}
    circles = set()

    def visit(module, path):
        state[module] = True
        for target in sorted(imports(module, for_types=False)):
            if target in path:
                circles.add(" -> ".join((*path[path.index(target) :], target)))
            elif target not in state:
                visit(target, (*path, target))

    for module in sorted(modules()):
        if module not in state:
            visit(module, (module,))
    assert circles == set()
