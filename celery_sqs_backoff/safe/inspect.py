"""Find the records under a name, such as ``"order:7"``, and delete them for an operator.

The store has only hashes of keys, so a record can be found only by its exact name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kombu.utils.json import loads

from ..store.errors import RecordRejected
from ..store.records import Record, Records
from .document import BEGUN, CLOSED, CLOSING, CONFIRM, DONE, OPEN

_STATES = (BEGUN, CONFIRM, DONE, OPEN, CLOSING, CLOSED)


@dataclass(frozen=True)
class Entry:
    """One guard, lock, workflow or step.

    Attributes:
        kind: ``guard``, ``lock``, ``workflow`` or ``step``. Steps outside a workflow that share a
            record are also shown as a ``workflow``.
        name: the key of a guard or lock, or the name of a workflow or step.
        state: the state in the record, but ``held`` for a lock, and ``ended`` for a workflow whose
            block has ended well. ``rejected`` = this project did not write the record.
        key: the record's key in the store.
        record: the record in the store. For a step, it is the record of the workflow, scope or
            message. ``None`` = the record was rejected.
        result: the recorded result as JSON, or ``None``.
    """

    kind: str
    name: str
    state: str
    key: str
    record: Record | None = None
    result: str | None = None


def look(records: Records, scope: str) -> list[Entry]:
    """Return the records under a name.

    Arguments:
        scope: a guard's or lock's key, the ``scope=`` of a step, or a workflow's name, such as
            ``"order:7"``. For the steps of one message, it is ``"task:NAME:ID"``.

    Raises:
        StoreUnavailable: the store did not answer.
    """
    asked = [
        ("guard", "guard", scope),
        ("lock", "lock", scope),
        ("workflow", "scope", scope),
        ("workflow", "steps", f"scope:{scope}"),
    ]
    if scope.startswith("task:"):
        asked.append(("workflow", "steps", scope))
    return [entry for each in asked for entry in _entries(records, *each)]


def free(records: Records, entry: Entry) -> bool:
    """Delete a record unless it has changed since :func:`look`. Return whether it was deleted.

    After that, another message can pass the guard, or another run can take the lock. The next run
    does the step, or each step of the workflow, again. But if the workflow's steps were undone, or
    are being undone, its steps without an ``undo`` stay done, and the next run does only the others
    again, with new idempotency keys. A rejected record is deleted even if it has changed.
    """
    record = entry.record
    if record is None:
        return records.discard(entry.key)
    if entry.kind not in ("workflow", "step"):
        return records.delete(record)
    steps = record.fields["steps"]
    if entry.kind == "step":
        # Read the record again, because the caller may have freed another step in it.
        now = records.reread(record)
        if now is None or now.fields["steps"].get(entry.name) != steps[entry.name]:
            return False
        rest = {n: step for n, step in now.fields["steps"].items() if n != entry.name}
        return records.replace(now, now.fields | {"steps": rest}) is not None
    if record.fields["state"] == OPEN:
        return records.delete(record)
    kept = {name: steps[name] for name in kept_steps(entry)}
    versions = dict(record.fields.get("versions", {}))
    # The provider knows an undone step's old idempotency key. It would ignore a call with that key.
    for name in steps.keys() - kept.keys():
        versions[name] = versions.get(name, 1) + 1
    return records.replace(record, {"state": OPEN, "steps": kept, "versions": versions}) is not None


def kept_steps(entry: Entry) -> list[str]:
    """Return the names of the steps that stay done when ``free`` frees an undone workflow."""
    if entry.kind != "workflow" or entry.record is None:
        return []
    fields = entry.record.fields
    if fields["state"] == OPEN:
        return []
    return [name for name, step in fields["steps"].items() if step.get("undo") is None]


def _entries(records: Records, shown: str, kind: str, name: str) -> list[Entry]:
    try:
        record = records.get(kind, name)
        if record is None:
            return []
        steps = record.fields["steps"].items() if shown == "workflow" else ()
        return [
            _entry(shown, name, record, record.fields),
            *(_entry("step", each, record, step) for each, step in steps),
        ]
    # Without a secret, records are not signed, so a record may contain anything.
    except (RecordRejected, ValueError, KeyError, TypeError, AttributeError):
        return [Entry(shown, name, "rejected", records.key(kind, name))]


def _entry(kind: str, name: str, record: Record, fields: dict[str, Any]) -> Entry:
    if kind == "lock":
        return Entry(kind, name, "held", record.key, record)
    result, state = fields.get("result"), fields["state"]
    loads(result or "null")
    if state not in _STATES:
        raise ValueError("unknown state")
    if state == OPEN and fields.get("ended"):
        state = "ended"
    return Entry(kind, name, state, record.key, record, result)
