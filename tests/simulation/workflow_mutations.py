"""Remove one rule of workflows at a time. The random histories must find each missing rule."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from celery_sqs_backoff.safe import document, lock, take_back
from celery_sqs_backoff.store import records


def _edited(owner: Any, name: str, *edits: tuple[str, str]) -> Any:
    """Replace a function by a copy with these edits of its source."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in edits:
        assert old in source, f"{name} has no {old!r}"
        source = source.replace(old, new)
    scope: dict[str, Any] = {}
    code = compile(
        "from __future__ import annotations\n" + source, function.__code__.co_filename, "exec"
    )
    exec(code, function.__globals__, scope)  # our own source
    return patch.object(owner, name, scope[name])


_LOCKED = "with Lock(records, scope, lease=_LEASE_SECONDS):"

MUTATIONS: dict[str, Callable[[], Any]] = {
    "rule 1: a write overwrites a change by another run": lambda: _edited(
        records.Records,
        "replace",
        (
            "self.store.replace(old.key, old.raw, raw, ttl)",
            "self.store.replace(old.key, self.store.get(old.key) or old.raw, raw, ttl)",
        ),
    ),
    "rule 1: a workflow takes no lock": lambda: _edited(
        lock.Lock, "acquire", ("if not there.is_new:", "if False:")
    ),
    "rule 2: a run that enters writes nothing": lambda: _edited(
        document.Document,
        "enter",
        ('if self.update(change)["state"] != OPEN:', 'if self.fields["state"] != OPEN:'),
    ),
    "rule 3: a run that enters becomes the owner": lambda: _edited(
        document.Document,
        "enter",
        (
            "return {",
            'return {"owner": self._message, ',
        ),
    ),
    "rule 3: the first message stays the owner": lambda: _edited(
        document.Document,
        "_begin",
        ('{"owner": self._message}', '{"owner": fields.get("owner") or self._message}'),
    ),
    "rule 4: a given-up message sends no task": lambda: patch(
        "tests.simulation.workflow.World.give_up", lambda world, run: world.gave_up.add(run.number)
    ),
    "rule 5: no lock is taken": lambda: _edited(take_back, "next_step", (_LOCKED, "if True:")),
    "rule 5: any message may undo the workflow": lambda: _edited(
        take_back, "next_step", ('or fields.get("owner") != message', "")
    ),
    "rule 5: a workflow that has ended is undone": lambda: _edited(
        take_back, "next_step", ("not has_undo or ", "")
    ),
    "rule 5: a workflow is undone although a later run entered it": lambda: _edited(
        take_back, "next_step", ("entered_at > began and entered_by != run", "False")
    ),
    "rule 5: the given-up run itself counts as a later run": lambda: _edited(
        take_back, "next_step", (" and entered_by != run", "")
    ),
    "rule 5: two given-up messages both undo the workflow": lambda: _edited(
        take_back, "next_step", ('if fields["by"] != by:', "if False:")
    ),
    "rule 5: the first step is undone first": lambda: _edited(
        take_back, "next_step", ("reversed(fields", "list(fields")
    ),
    "an ended block keeps its undoing tasks": lambda: _edited(
        document.Document, "end", ('step | {"undo": None}', "step")
    ),
    "a step in doubt is forgotten": lambda: _edited(
        document.Document, "step", ('step["runs"] == 1 and self._is_certain(exc)', "True")
    ),
    "a joined step is forgotten": lambda: _edited(
        document.Document, "step", ('step["runs"] == 1 and ', "")
    ),
    "the lock is not renewed before a step": lambda: _edited(
        document.Document, "step", ("self._before()", "pass")
    ),
}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    with MUTATIONS[name]():
        yield
