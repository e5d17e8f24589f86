"""What does the store hold for a scope, and how is it freed by hand?

Keys are hashed, so nothing is searched for: each record is asked for by what it is about.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kombu.utils.json import dumps, loads

from ..store.protocol import KEEP_SECONDS, key_of
from ..store.vault import Vault
from . import keys
from .errors import RecordRejected
from .guard import read_record
from .scope import CLOSED, OPEN, scope_key
from .steps import step_key

__all__ = ["Entry", "free", "look"]

_STATES = ("in progress", "confirm", "done", "open", "closing", "closed", "ended")


@dataclass(frozen=True)
class Entry:
    """One record.

    ``kind`` is ``guard``, ``lock``, ``workflow`` or ``step``; ``state`` is the record's, or
    ``rejected`` if this project did not write it; ``result`` is JSON, or ``None``. ``taken_back``:
    the steps of a workflow that is closed; ``kept``: the names of those without ``undo``.
    """

    kind: str
    name: str
    state: str
    key: str
    text: str | None = None
    result: str | None = None
    taken_back: tuple[tuple[str, str], ...] = ()
    kept: tuple[str, ...] = ()


def look(vault: Vault, scope: str) -> list[Entry]:
    """Return what there is under a scope's name.

    Arguments:
        scope: a guard's or lock's key, a ``scope=``, or a workflow's name, such as ``"order:7"``;
            ``"task:NAME:ID"`` for what belongs to one message.

    Raises:
        StoreUnavailable: nothing is known.
    """
    return list(_entries(vault, scope))


def free(vault: Vault, entry: Entry) -> bool:
    """Delete a record, if it is still as it was seen; whether it was. A rejected one goes as it is.

    A freed guard lets the next message pass. A freed lock lets a second run in beside one that is
    still going. A freed step is done again. A freed workflow forgets which steps it has to take
    back. One that was taken back begins anew: its steps are freed too, and the idempotency keys of
    their names renewed, because the provider still knows what was taken back by the old ones. But
    not those without ``undo``: what they have done stands, and would be done twice.
    """
    if entry.text is None:
        return vault.discard(entry.key)
    if entry.taken_back and vault.get(entry.key) != entry.text:
        return False  # freed meanwhile: its steps may be those of a run that has begun anew
    for scope, name in entry.taken_back:
        keys.renew(vault, scope, name)
        vault.discard(step_key(scope, name))
    if entry.kept:  # still listed: who frees one of these must find it
        anew = dumps({"state": OPEN, "steps": [*entry.kept]})
        return vault.replace(entry.key, entry.text, anew, KEEP_SECONDS)
    return vault.delete(entry.key, entry.text)


def _entries(vault: Vault, scope: str) -> Iterator[Entry]:
    yield from _one(vault, "guard", scope, key_of("guard", scope))
    yield from _one(vault, "lock", scope, key_of("lock", scope))
    yield from _of_the_scope(vault, scope, f"scope:{scope}")
    if scope.startswith("task:"):  # of a message; or the name of a scope, which may begin so too
        yield from _of_the_scope(vault, scope, scope)


def _of_the_scope(vault: Vault, scope: str, inner: str) -> Iterator[Entry]:
    yield from _one(vault, "lock", f"{scope} (of the workflow)", key_of("lock", inner))
    for workflow in _one(vault, "workflow", scope, scope_key(inner)):
        names = loads(workflow.text)["steps"] if workflow.text else ()
        steps = [
            step for name in names for step in _one(vault, "step", name, step_key(inner, name))
        ]
        if workflow.state == CLOSED:
            kept = tuple(step.name for step in steps if _has_no_undo(step))
            gone = tuple((inner, name) for name in names if name not in kept)
            workflow = replace(workflow, taken_back=gone, kept=kept)
        yield workflow
        yield from steps


def _has_no_undo(step: Entry) -> bool:
    return step.text is not None and "undo" not in loads(step.text)


def _one(vault: Vault, kind: str, name: str, key: str) -> Iterator[Entry]:
    try:
        text = vault.get(key)
    except RecordRejected:
        yield Entry(kind, name, "rejected", key)
        return
    if text is None:
        return
    if kind == "lock":
        yield Entry(kind, name, "held", key, text)
        return
    try:
        record = read_record(text)
        state = "ended" if record.get("ended") and record["state"] == "open" else record["state"]
        result = vault.reveal(record["result"]) if "result" in record else None
        _check(kind, state, result, record)
    # Unsigned, so anybody's; or another key's.
    except (RecordRejected, ValueError, KeyError, TypeError, AttributeError):
        yield Entry(kind, name, "rejected", key)
        return
    yield Entry(kind, name, state, key, text, result)


def _check(kind: str, state: object, result: str | None, record: dict[str, Any]) -> None:
    """Refuse a record that no code of ours writes: it would be printed, or looked through."""
    if state not in _STATES:
        raise ValueError("unknown state")
    if result is not None:
        loads(result)
    if kind == "workflow":
        for name in record["steps"]:
            step_key("", name)
