"""The task that takes back the workflows of a message that was given up, one step at a time.

Giving a message up only sends this task. It has retries and a dead letter of its own. It waits for
the lock. If a process was killed in the workflow, the lock stays taken until its lease ends. The
task decides whether there is anything to take back, and sends the undoing task of the last step.
When that has ended well, Celery calls this task again, for the step before.
"""

from __future__ import annotations

from typing import Any

from celery.canvas import Signature, maybe_signature
from kombu.utils.json import loads

from ..store.errors import TryLater
from ..store.records import Records
from ..store.settings import records_of
from .document import CLOSED, CLOSING, OPEN, Document, send
from .errors import Busy, LockLost
from .lock import Lock
from .workflow import scopes_of

NAME = "celery_sqs_backoff.take_back"

#: That the lock outlives a killed process.
_LEASE_SECONDS = 60.0


def register(app: Any, base: type) -> None:
    """Give an app the task, once."""
    if NAME not in app._tasks:
        app._task_from_fun(_take_back, name=NAME, base=base, bind=True, ignore_result=True)


def send_take_back(
    app: Any, message: str, *, run: str, began: float, queue: str | None = None
) -> None:
    """Send the task for a message that is given up.

    Arguments:
        message: digest of the message.
        run, began: the run that gives it up, and when that began (seconds since the epoch).
        queue: to send to; ``None`` = as the app routes the task.
    """
    app._tasks[NAME].apply_async((message, run, began, queue), **_route(queue, message))


def links_of(task: Any) -> list[Signature]:
    """Return the next part, which an undoing task calls when it has ended well."""
    links = [maybe_signature(link, app=task.app) for link in task.request.callbacks or ()]
    return [link for link in links if link.task == NAME]


def _route(queue: str | None, message: str) -> dict[str, str]:
    """Return the options that send the task to the queue of the message."""
    if queue is None or not queue.endswith(".fifo"):
        return {} if queue is None else {"queue": queue}
    # A group of its own, because a task that waits for a lock would hold up the others.
    return {"queue": queue, "MessageGroupId": message}


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
    """Do the next part, of one workflow or of all that the message has entered.

    Arguments:
        by: ID of the task that began to take the workflow back; ``None`` if this one begins.
        undone: name of the step in ``scope`` that was just undone.
    """
    records = records_of(self.app)
    owed: TryLater | None = None
    by = by or self.request.id
    for each in [scope] if scope is not None else scopes_of(records, message):
        try:
            step = next_step(records, each, message, run, began, by=by, undone=undone)
            if step is None:
                continue
            name, fields = step
            link = self.si(message, run, began, queue, each, name, by)
            link.set(**_route(queue, message))
            undo = maybe_signature(loads(fields["undo"]), app=self.app)
            result = loads(fields["result"]) if "result" in fields else None
            # Not while the lock is held: an eager undoing task calls this one in its run.
            send(undo, result, f"undo {fields['id']}", link=link)
        except LockLost as exc:
            owed = Busy(str(exc))
        except TryLater as exc:
            owed = exc
    if owed is not None:
        raise owed


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
    """Return the next step to undo, or ``None`` if all is undone or the workflow is not ours.

    Arguments:
        by: ID of the task that began to take the workflow back, which the record keeps. It is the
            same when that task is delivered again or redriven, so a process that was killed before
            it had sent the first undoing task does no harm, and no second chain begins.

    Raises:
        Busy: a run is in the workflow.
        LockLost: the lease was over.
    """
    with Lock(records, scope, lease=_LEASE_SECONDS):
        document = Document(records, "scope", scope)
        fields = document.fields
        if fields["state"] == CLOSED or fields.get("owner") != message:
            return None
        if fields["state"] == OPEN:
            entered_by, entered_at = fields.get("entered", {}).get(message, (run, 0.0))
            if fields.get("ended") or (entered_at > began and entered_by != run):
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
