"""Undo the workflows of a message that was given up, one step at a time, in a separate task.

The worker that gives a message up only sends this task, the take-back task. This task has its own
retries and dead letter. While a run holds the workflow's lock, the take-back task is retried. If a
process was killed in the workflow, the retries go on until the lock's lease ends.

The take-back task decides whether there are steps to undo, and sends the undo task of the last
step, with a callback (``link``). When the undo task has succeeded, Celery sends the callback, which
is the take-back task again, for the step before.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid5

from celery.canvas import Signature, maybe_signature
from kombu.utils.json import loads

from ..retry.options import Options
from ..store.records import Records
from ..store.settings import records_of
from .document import CLOSED, CLOSING, OPEN, Document, send
from .errors import Busy, LockLost
from .lock import Lock
from .names import NAMESPACE
from .workflow import scopes_of

NAME = "celery_sqs_backoff.take_back"

#: Options for which the take-back task ignores the app-wide setting, and has our default.
_OWN_OPTIONS = ("max_retries", "retry_for", "crash_budget", "on_give_up", "provider")

#: Lease of the workflow's lock while the take-back task reads and writes the workflow's record.
_LEASE_SECONDS = 60.0


def register(app: Any, base: type) -> None:
    """Register the take-back task in an app, unless it is registered already."""
    if NAME in app._tasks:
        return
    # An app-wide limit must not end the task while it waits for the lease of a killed run.
    ours = {name: getattr(Options(), name) for name in _OWN_OPTIONS}
    app._task_from_fun(_take_back, name=NAME, base=base, bind=True, ignore_result=True, **ours)


def send_take_back(
    app: Any, message: str, *, run: str, began: float, queue: str | None = None
) -> None:
    """Send the take-back task for a message that is given up.

    Arguments:
        message: digest of the message.
        run: ID of the run that gave the message up; empty = not known.
        began: when that run began, in seconds since the epoch.
        queue: queue to send to; ``None`` = the app's routing decides.
    """
    app._tasks[NAME].apply_async((message, run, began, queue), **_route(queue, message))


def links_of(task: Any) -> list[Signature]:
    """Return the callbacks of a task that are the take-back task. Only undo tasks have them."""
    links = [maybe_signature(link, app=task.app) for link in task.request.callbacks or ()]
    return [link for link in links if link.task == NAME]


def _route(queue: str | None, group: str) -> dict[str, str]:
    """Return the options that send a task to ``queue``. ``None`` = the app's routing decides."""
    if queue is None or not queue.endswith(".fifo"):
        return {} if queue is None else {"queue": queue}
    # Use a separate message group, because a task that waits for a lock delays its whole group.
    return {"queue": queue, "MessageGroupId": group}


def _take_back(
    self: Any,
    message: str,
    run: str,
    began: float,
    queue: str | None = None,
    scope: str | None = None,
    undone: str | None = None,
    by: str | None = None,
) -> None:
    """Send the next undo task of a workflow.

    If the message has entered several workflows, send this task once for each of them.

    Arguments:
        message, run, began, queue: as for :func:`send_take_back`.
        scope: the workflow; ``None`` = all workflows that the message has entered.
        undone: name of the step in ``scope`` that was just undone; ``None`` = no step yet.
        by: ID of the task that began to undo the workflow; ``None`` = this task.
    """
    records, by = records_of(self.app), by or self.request.id
    scopes = [scope] if scope is not None else scopes_of(records, message)
    if len(scopes) != 1:
        for each in scopes:
            what, group = f"take_back {by} {each}", f"{message}-{uuid5(NAMESPACE, each)}"
            send(self.s(run, began, queue, each), message, what, **_route(queue, group))
        return
    [scope] = scopes
    try:
        step = next_step(records, scope, message, run, began, by=by, undone=undone)
    except LockLost as exc:
        raise Busy(str(exc)) from None
    if step is None:
        return
    name, fields = step
    link = self.si(message, run, began, queue, scope, name, by)
    undo = maybe_signature(loads(fields["undo"]), app=self.app)
    undo.link(link.set(**_route(queue, message)))
    result = loads(fields["result"]) if "result" in fields else None
    # Send without holding the lock. An eager undo task runs its ``link`` before ``send``
    # returns. The link is this task again, which needs the lock.
    send(undo, result, f"undo {fields['id']}")


def next_step(
    records: Records,
    scope: str,
    message: str,
    run: str,
    began: float,
    *,
    by: str,
    undone: str | None = None,
) -> tuple[str, dict[str, Any]] | None:
    """Mark the step that was just undone, and return name and fields of the next step to undo.

    Return ``None`` if there is nothing to undo:

    * no step has an ``undo``, as after a block that has ended without an exception;
    * all steps are undone;
    * the message does not own the workflow;
    * a later run of the message has entered the workflow;
    * another take-back task already undoes the workflow.

    Arguments:
        scope: name of the workflow.
        message, run, began: as for :func:`send_take_back`.
        by: ID of the task that began to undo the workflow. The record keeps this ID, so no other
            task undoes the same workflow. The ID stays the same when SQS delivers the task again or
            the task is redriven. So the task can continue after its process was killed.
        undone: name of the step that was just undone; ``None`` = no step yet.

    Raises:
        Busy: a run holds the workflow's lock.
        LockLost: the lease has ended during this call.
    """
    with Lock(records, scope, lease=_LEASE_SECONDS):
        document = Document(records, "scope", scope)
        fields = document.fields
        if fields["state"] == CLOSED or fields.get("owner") != message:
            return None
        if fields["state"] == OPEN:
            entered_by, entered_at = fields.get("entered", {}).get(message, (run, 0.0))
            has_undo = any(step["undo"] is not None for step in fields["steps"].values())
            if not has_undo or (entered_at > began and entered_by != run):
                return None
            fields = document.update(lambda _: {"state": CLOSING, "by": by})
        if fields["by"] != by:
            return None
        if undone in fields["steps"]:
            done = fields["steps"][undone] | {"undone": True}
            fields = document.update(lambda f: {"steps": f["steps"] | {undone: done}})
        for name, step in reversed(fields["steps"].items()):
            if step["undo"] is not None and not step.get("undone"):
                return name, step
        document.update(lambda _: {"state": CLOSED})
        return None
