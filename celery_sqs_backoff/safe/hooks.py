"""Hooks of a task that has guards and workflows.

Around each run, they check the task's guard. When a message is given up, they send the task that
undoes the message's workflows.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from inspect import getattr_static
from typing import Any

from celery.exceptions import Ignore
from celery.utils.log import get_logger

from ..retry.outcomes import NonRetryable, Outcome, Verdict
from ..store.errors import TryLater
from ..store.protocol import KEEP_SECONDS
from ..store.settings import has_store, records_of
from ..task.extension import Extension
from ..task.handover import run_of
from ..text import error_site, printable
from .errors import AlreadyDone, NotDispatched, NotUndone, Refused
from .guard import Passage, cut_short, enter, finish, release
from .run import current
from .take_back import links_of, send_take_back
from .workflow import scopes_of

logger = get_logger(__name__)  # the main process also logs, so this is no task logger


class SafeExtension(Extension):
    """Checks guards, records which runs may have had an effect, and starts undoing workflows."""

    def before_run(self, task: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Pass the task's guard, and record the run if the task has an ``on_not_processed``.

        ``run_failed`` needs this record to know whether an earlier run may have done the work.

        Raises:
            Refused: another message has passed.
            AlreadyDone: an earlier run of this message has succeeded.
            StoreUnavailable: the store did not answer.
        """
        if task.guard is None and task.backoff_options.on_not_processed is None:
            return
        state = current()
        assert state is not None  # a message is running
        message = message_digest(task.app, *state.message) if has_store(task.app) else ""
        if task.guard is not None:
            key = task.guard.key_for(signature_of(type(task)), args, kwargs)
            state.guard = pass_guard(task, key, message, state.run, task.guard.window)
            if state.guard.is_done:
                raise AlreadyDone(state.guard.result, has_result=state.guard.has_result)
        if task.backoff_options.on_not_processed is not None and message:
            records = records_of(task.app)
            state.record = enter(records, message, message, state.run, KEEP_SECONDS, kind="run")

    def after_run(self, task: Any, result: object) -> None:
        """Note in the guard's record that the message is done. Never raises."""
        run = run_of(task.request)
        # If the run has published a copy (``self.retry``), the message is not done. The copy has
        # the same task ID, so a guard's record that says done would keep the copy from running.
        state = None if run is None or run.copy is not None else run.extension_state
        if state is not None and state.guard is not None:
            attempt(task.app, finish, state.guard, result)

    def run_failed(self, task: Any, exc: BaseException, verdict: Verdict) -> Verdict:
        """Delete the records of a failed run that had no effect, and return the final verdict.

        Returns:
            The verdict on the exception, or UNKNOWN if an earlier run may have done the work. The
            verdict of a ``NonRetryable`` never changes, because the task that raises it also speaks
            for its earlier runs.

        Raises:
            Exception: the task is an undo task that has ended by ``Ignore``, and the task that
                undoes the next step could not be sent. The undo task's message becomes a dead
                letter.
        """
        if isinstance(exc, Ignore):
            # Celery sends no callbacks after ``Ignore``. So send an undo task's callback here, for
            # the workflow's next step.
            for link in links_of(task):
                link.apply_async()
            return verdict
        run = run_of(task.request)
        state = None if run is None else run.extension_state
        if state is None:
            return verdict
        if isinstance(exc, TryLater):
            if state.record is not None:
                attempt(task.app, release, state.record)
            if state.guard is not None and not state.acts:
                attempt(task.app, cut_short, state.guard)
            return verdict
        if not verdict.nothing_was_processed:
            return verdict
        is_alone = state.record is None or attempt(task.app, release, state.record)
        if state.guard is not None and not state.acts and is_alone:
            is_alone = attempt(task.app, release, state.guard)
        if is_alone or isinstance(exc, NonRetryable):
            return verdict
        return Verdict(Outcome.UNKNOWN, verdict.retry_after, safe_to_repeat=verdict.wants_retry)

    def refused(self, task: Any, run: Any) -> None:
        """Send the task that undoes the message's workflows, if the message has entered any.

        An earlier run of the message may have passed the guard and begun a workflow. Then the
        guard's window ended, and another message passed.

        Raises:
            NotDispatched: the task could not be sent.
            StoreUnavailable: the store did not answer.
        """
        if not task.has_workflows:
            return
        message = message_digest(task.app, task.name, task.request.id)
        if not scopes_of(records_of(task.app), message):
            return
        queue = None if run.delivery is None else run.delivery.queue
        facts = {"run": run.id, "began": time.time(), "queue": queue}
        if not self.given_up(task, task.request.id, **facts):
            raise NotDispatched("the steps of an earlier run could not be undone")

    def given_up(
        self, task: Any, task_id: str, *, run: str | None, began: float, queue: str | None = None
    ) -> bool:
        """Send the task that undoes the message's workflows. Return False if sending failed."""
        if not task.has_workflows or not has_store(task.app):
            return True
        try:
            message = message_digest(task.app, task.name, task_id)
            send_take_back(task.app, message, run=run or "", began=began, queue=queue)
        except Exception as exc:  # noqa: BLE001  # the broker's library may raise any exception
            logger.error(
                "sqs_backoff.not_taken_back: task %s[%s]: %s",
                *(printable(task.name), printable(task_id), error_site(exc.__cause__ or exc)),
            )
            return False
        return True


def pass_guard(task: Any, key: str, message: str, run: str, window: float) -> Passage:
    """Pass a guard for the message that the task is running.

    Raises:
        Refused: another message has passed.
        NotUndone: another message has passed, and this message undoes a step of a workflow.
        StoreUnavailable: the store did not answer.
    """
    try:
        return enter(records_of(task.app), key, message, run, window)
    except Refused as exc:
        if links_of(task):
            raise NotUndone(f"{exc}: the step was not undone") from None
        raise


def message_digest(app: Any, task_name: str, task_id: str) -> str:
    """Return the digest that stands for a message in the store's records."""
    return records_of(app).digest("message", task_name, str(task_id))


def signature_of(cls: type) -> inspect.Signature:
    """Return the signature of a task's function, without ``self``."""
    run = getattr_static(cls, "__wrapped__", None)  # the function that @app.task decorates
    if run is None:
        run = getattr_static(cls, "run")
    if isinstance(run, staticmethod | classmethod):
        return inspect.signature(run.__get__(None, cls))
    signature = inspect.signature(run)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def attempt(app: Any, act: Callable[..., object], *args: Any) -> bool:
    """Call ``act`` with the app's records, and return whether it succeeded.

    Never raises, because an error of the store must not change how the run ends.
    """
    try:
        return act(records_of(app), *args) is not False
    except Exception as exc:  # noqa: BLE001  # the store is down, or a transaction is open
        state = current()
        logger.error(
            "sqs_backoff.guard_not_written: task %s[%s]: %s: %s",
            *map(printable, ("", "") if state is None else state.message),
            act.__name__,
            error_site(exc.__cause__ or exc),
        )
        return False
