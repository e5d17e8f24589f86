"""What the task's machinery asks of its guard and workflows, in the process that runs the task."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from inspect import getattr_static
from types import CodeType
from typing import Any, ClassVar

import celery.app.task as celery_task
from celery.app.task import Context
from celery.exceptions import ImproperlyConfigured, SoftTimeLimitExceeded
from celery.utils.log import get_task_logger

from ..store.settings import vault_of
from ..store.urls import has_store
from ..store.vault import Vault
from ..text import error_site, printable
from .errors import AlreadyDone, Refused
from .guard import Guard, Passage, Run, enter, finish, is_joined, unset
from .identity import acts_of, carrier_of, has_copy, message_of, run_id_of
from .message_end import TakenBack, compensate_scopes_of, leave_scopes_of
from .names import input_of
from .workflow import Workflow
from .writes import ask_to_write

__all__ = ["Hooks", "asks_the_store", "enters_workflows", "ignores_result"]

logger = get_task_logger(__name__)

#: Seconds before each further attempt to take back the workflows of a message that goes whatever
#: comes of it.
_PAUSES = (1.0, 4.0)

_ASKING = {"exclusive", "guarded"}


#: Header of a copy that ``retry()`` publishes: stands for what the first message was given.
_FIRST_INPUT = "sqs_backoff_first_input"


class Hooks:
    """Base of :class:`SafeTask`: guard before and after the run, compensation when given up."""

    guard: Guard | None = None

    #: Whether the body of a run asks the store for a guard or a lock: read off its code when the
    #: task is bound, or learned from a run.
    asks_in_its_body: ClassVar[bool] = False

    #: Whether the task's code names a workflow: an earlier run may have entered one, also where
    #: this one is no retry, as after a redrive. Read off its code, or learned, likewise.
    enters_workflows: ClassVar[bool] = False

    # What Celery's Task gives.
    name: Any
    app: Any
    request: Any
    backend: Any
    ignore_result: Any

    @classmethod
    def _check_guard(cls) -> None:
        """When the task is bound to its app: refuse a guard that could not work."""
        guard: object = cls.guard
        if guard is None:
            return
        if not isinstance(guard, Guard):
            raise ImproperlyConfigured(
                f"invalid guard {guard!r}: expected a Guard(key=..., window=...), or None"
            )
        guard.check(_signature_of(cls))

    def _ask_at_the_door(self) -> None:
        """Before a run whose body will ask the store: is it there, and does it take changes?

        Nothing has been done yet, so the run can be retried. In the middle of it that is not
        known, and a :class:`StoreLost` is not. A run that has made its guard's record has asked by
        that.

        Raises:
            StoreUnavailable: it is not, or does not.
        """
        passage: Passage | None = getattr(self.request, "sqs_passage", None)
        has_asked = passage is not None and passage.is_ours
        if has_store(self.app) and not has_asked:
            ask_to_write(self._vault.store)

    def _pass_guard(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before the run.

        Raises:
            AlreadyDone: a run of this message has ended well; ``result`` is what it returned.
            Refused: another message has passed.
            StoreUnavailable: nothing is known.
        """
        if self.guard is None:
            return
        key = self.guard.key_for(_signature_of(type(self)), args, kwargs)
        run = self._run.given(self._vault.digests("input", self._input(args, kwargs)))
        passage = enter(self._vault, key, run, self.guard.window)
        if passage.is_done:
            raise AlreadyDone(passage)
        # What the run does to its arguments does not change which record is its own.
        self.request.sqs_passage = passage

    def _input(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """What stands for the arguments; in a copy that has others, for those of the first."""
        first = (self.request.headers or {}).get(_FIRST_INPUT)
        # Now: the run may change its arguments in place.
        text = str(first or sha256(input_of(None, args, kwargs).encode()).hexdigest())
        self.request.sqs_input = text
        return text

    def _options_of_copy(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of a copy that ``retry()`` publishes: the guard knows it by its header."""
        text = getattr(self.request, "sqs_input", None)
        if text is None:
            return options
        given = options.get("headers") or self.request.as_execution_options().get("headers") or {}
        return {**options, "headers": {**given, _FIRST_INPUT: text}}

    def _finish_guard(self, result: object) -> None:
        """After a run that ended well: this message is done. Does not raise."""
        passage: Passage | None = getattr(self.request, "sqs_passage", None)
        # Published again by retry(), whose Retry was not raised, the message is not done.
        if passage is not None and not has_copy(self.request):
            try:
                finish(self._vault, passage, result)
            except Exception as exc:  # noqa: BLE001  # the store is away, or the task has left a transaction open
                # The work is done, and its result counts, whatever a store of the user's raises.
                # Delivered again, the message runs again.
                logger.error("sqs_backoff.guard_not_finished: %s", error_site(exc.__cause__ or exc))

    def _unset_guard(self, args: object = (), kwargs: object = None) -> None:
        """With ``undo``: what has failed was not processed; nor was a step. Does not raise."""
        passage: Passage | None = getattr(self.request, "sqs_passage", None)
        if passage is not None and not acts_of(self):
            self._unset(passage)

    def _is_joined(self) -> bool | None:
        """Whether another run of this message has passed the guard, and not given it back.

        Does not raise. ``None``: the store does not say.
        """
        passage: Passage | None = getattr(self.request, "sqs_passage", None)
        try:
            return passage is not None and is_joined(self._vault, passage)
        except Exception:  # noqa: BLE001  # away, or whatever a user's store raises
            return None

    def _take_back_refused(self, refused: Refused) -> bool:
        """Take back what earlier runs have done in workflows, if the window ended before the next.

        Whether the message may go; see :meth:`_compensate_given_up`. Not once this run has entered
        a workflow: another message may go on with that one.
        """
        if getattr(self.request, "sqs_workflows", None):
            self._leave_workflows()
            return True
        return isinstance(refused, AlreadyDone) or self._compensate_given_up(
            may_run_again=True, is_refused=True
        )

    def _is_awaited(self, refused: Refused) -> bool:
        """Whether what follows the task waits for a result that could not be kept.

        The run that was done may have ended before it handed the result on; nobody can now.
        """
        is_lost = isinstance(refused, AlreadyDone) and not refused.has_result
        request = self.request
        return is_lost and bool(request.chain or request.callbacks or request.chord)

    def _end_refused(self, refused: Refused) -> Exception | None:
        """Store why the message was refused, which ends its chain there. Does not raise.

        Returns:
            what kept a chord from going on that waits for the message, or for its chain.
        """
        request = self.request
        logger.info(
            "sqs_backoff.refused: %s[%s] ends without a run: %s",
            *(printable(self.name), printable(request.id), refused),
        )
        if request.is_eager:
            return None
        is_stored = not ignores_result(self, request)
        members = list(_chord_members(request.chain))
        try:
            # Not stored, it is still a member of its chord.
            self.backend.mark_as_done(
                request.id, refused.result, request=request, store_result=is_stored
            )
            for follower in members:
                self.backend.mark_as_done(follower.id, refused.result, request=follower)
        except Exception as exc:  # noqa: BLE001  # whatever the result backend's library raises
            logger.error("sqs_backoff.refusal_not_stored: %s", error_site(exc))
            return exc if request.chord or members else None
        return None

    def _compensate_given_up(self, *, may_run_again: bool, is_refused: bool = False) -> bool:
        """Take back the workflows of this message, which is given up; whether it may go.

        Does not raise. ``False``: something is owed, and the message should come again for it.

        Arguments:
            may_run_again: whether what has failed may be repeated. If not, the message goes
                although the store is away, because its next run could do it once more.
            is_refused: by a guard, which another message has passed.
        """
        request = self.request
        if not has_store(self.app):
            return True
        opened: dict[str, Workflow] = getattr(request, "sqs_workflows", {})
        may_owe = bool(opened) or self.enters_workflows  # by an earlier run, before this one has
        if not may_owe and not request.retries:
            return True  # no run of this message has entered one
        compensate = partial(
            compensate_scopes_of,
            *(self._vault, self.app, self._run),
            opened=opened,
            is_refused=is_refused,
        )
        taken = compensate()
        if taken is TakenBack.UNREACHED and may_owe and not may_run_again:
            for seconds in _PAUSES:
                with suppress(SoftTimeLimitExceeded):  # what is owed is owed all the same
                    time.sleep(seconds)
                taken = compensate()
                if taken is not TakenBack.UNREACHED:
                    break
        if taken is TakenBack.UNREACHED:
            return not (may_owe and may_run_again)
        return taken is TakenBack.DONE

    def _leave_workflows(self) -> None:
        """The message ends here, and well: it goes on with no workflow. Does not raise."""
        request = self.request
        if has_copy(request):
            return
        opened: dict[str, Workflow] = getattr(request, "sqs_workflows", {})
        has_earlier = bool(request.retries and self.enters_workflows and has_store(self.app))
        if opened or has_earlier:
            leave_scopes_of(
                self._vault, self.app, self._run, opened=opened, has_earlier=has_earlier
            )

    def _unset(self, passage: Passage) -> None:
        try:
            unset(self._vault, passage)
        except Exception as exc:  # noqa: BLE001  # the store is away, or the task has left a transaction open
            # The failure of the run counts, whatever a store of the user's raises. The record ends
            # with its window; until then it lets this message pass, and no other.
            logger.error("sqs_backoff.guard_not_unset: %s", error_site(exc.__cause__ or exc))

    def _is_certainly_not_processed(self, exc: BaseException) -> bool:
        """Whether nothing was done, by the verdict on the exception or on what is retried for."""
        if not isinstance(exc, Exception):
            return False
        judge: Callable[[Exception], Any] = getattr(self, "_judge")  # noqa: B009  # its host's
        return bool(judge(exc).nothing_was_processed)

    # Whose records

    @property
    def _run(self) -> Run:
        message = message_of(self)
        # Called as a function, it is a part of the run that has called it.
        carrier = carrier_of(self)
        request = carrier[1] if carrier else getattr(self, "request_stack").top  # noqa: B009
        return Run.of(self._vault, *message, run_id_of(request))

    @property
    def _vault(self) -> Vault:
        return vault_of(self.app)


def _chord_members(rest: Any) -> Iterator[Context]:
    """The tasks of the rest of a chain that a chord waits for, as requests.

    As ``celery.backends.base.Backend._fail_chain`` has it.
    """
    waiting = list(rest or ())
    while waiting:
        follower = Context(waiting.pop(0))
        options = follower.options or {}
        follower.update(options)
        follower.id, follower.group = options.get("task_id"), options.get("group_id")
        if follower.chord is not None and follower.id is not None:
            yield follower
        body = (follower.kwargs or {}).get("body")
        if getattr(follower, "subtask_type", None) == "chord" and body is not None:
            waiting.append(body)  # what waits for that chord waits for its body


def ignores_result(task: Any, request: Any) -> bool:
    """Whether Celery will store no result."""
    celerys_own = getattr(celery_task, "get_actual_ignore_result", None)  # Celery 5.7
    if celerys_own is not None:
        return bool(celerys_own(task, request))
    return bool(task.ignore_result or request.ignore_result)


def asks_the_store(function: Any) -> bool:
    """Whether a function's code names a method that asks for a guard or a lock."""
    return _code_names(function, _ASKING)


def enters_workflows(function: Any) -> bool:
    """Whether a function's code names a workflow."""
    return _code_names(function, {"workflow"})


def _code_names(function: Any, words: set[str]) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return isinstance(code, CodeType) and _names(code, words)


def _names(code: CodeType, words: set[str]) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return not words.isdisjoint(code.co_names) or any(_names(c, words) for c in inner)


def _signature_of(cls: type[Hooks]) -> inspect.Signature:
    """The arguments of a task, without ``self``."""
    run = getattr_static(cls, "__wrapped__", None)  # what @app.task was given
    if run is None:
        run = getattr_static(cls, "run")
    if isinstance(run, staticmethod | classmethod):
        return inspect.signature(run.__get__(None, cls))
    signature = inspect.signature(run)
    return signature.replace(parameters=list(signature.parameters.values())[1:])
