"""A workflow: steps under one lock, taken back together when its message is given up.

The scope's record names the message that works on it (``owner``) and the lock that it holds. Who
gives a message up compensates the scopes that this message owns, and no others: a scope that
another message has gone on with is that one's. If a guard refuses that one there, or it is given up
and has begun no step, the scope is the former owner's again; and if that was given up meanwhile
(``forsaken``), the later one compensates.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from celery.canvas import Signature
from celery.exceptions import Ignore
from celery.utils.log import get_task_logger
from kombu.utils.json import dumps, loads

from ..text import BUG_CALLS, error_site, printable
from . import keys
from .errors import Busy, Compensated, NotDispatched, Refused, StoreUnavailable
from .guard import Run
from .lock import Lock, refuse_lock_in_transaction
from .names import text_of
from .scope import CLOSING, OPEN
from .steps import Steps
from .store import KEEP_SECONDS, key_of, settle
from .vault import Vault

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TakenBack", "Workflow", "compensate_scopes_of"]

logger = get_task_logger(__name__)


class Workflow:
    """The steps of one business process, one run at a time: what ``self.workflow(...)`` returns.

    Use it with ``with``. Entering takes the lock; each step renews it first.

    Arguments:
        vault: where all is recorded.
        scope: of the business process, such as ``"order:7"``.
        app: the Celery app that sends the steps' tasks.
        run: the run that enters.
        lease: seconds above 0 that the lock outlives a killed holder. It must be longer than any
            one step takes.
        namespace: of the idempotency keys.
        is_certain: whether a step's exception says that nothing was done.
        note_act: called once a step has been done, or is in doubt.
        used: names of the steps that the run has had in this scope; they are added to.
        comes_back: whether the run is of a message that ends well, comes back or is given up
            (default). Nobody gives up a call as a function, outside any message.
    """

    def __init__(
        self,
        vault: Vault,
        scope: str,
        app: Any,
        run: Run,
        *,
        lease: float,
        namespace: str,
        is_certain: Callable[[BaseException], bool] = lambda _: False,
        note_act: Callable[[], None] = lambda: None,
        used: set[str] | None = None,
        comes_back: bool = True,
    ) -> None:
        self._vault = vault
        self._scope = scope
        self._namespace = namespace
        self._run = run
        self._lock = Lock(vault, scope, lease=lease)
        self._steps = Steps(vault, scope, app, run, is_certain=is_certain, note_act=note_act)
        self.used: set[str] = set() if used is None else used
        #: The lock's record with which this run has entered; empty before.
        self._entered_with = ""
        self._comes_back = comes_back
        self._is_inside = self._ended = False

    def step(
        self,
        name: str,
        fn: Callable[..., Any],
        *args: Any,
        undo: Signature | None = None,
        confirm: Signature | None = None,
        **kwargs: Any,
    ) -> Any:
        """Do a step, unless it is recorded as done; return its result. Renews the lock first.

        As ``SQSBackoffTask.step``, in this scope; further keyword arguments are ``fn``'s.

        Raises:
            LockLost: another run may hold the lock; nothing has been done.
            RuntimeError: outside the ``with`` block; nothing has been done.
            and all that ``SQSBackoffTask.step`` raises.
        """
        name = text_of("name", name)
        if name in self.used:
            refuse_second_use(name)
        if not self._is_inside:
            raise RuntimeError(f"the step {name!r} is outside its workflow's with block")
        self._lock.extend()
        result = self._steps.do(name, fn, args, kwargs, undo=undo, confirm=confirm)
        self.used.add(name)
        return result

    def key(self, name: object) -> str:
        """Return a UUID for a provider's idempotency header: the same on every attempt."""
        version = keys.version(self._vault, self._scope, name)
        return keys.idempotency_key(self._namespace, self._scope, name, version)

    def renew_key(self, name: object) -> str:
        """Return a new key, in force from now on. Never after a timeout: see ``docs``."""
        version = keys.renew(self._vault, self._scope, name)
        return keys.idempotency_key(self._namespace, self._scope, name, version)

    @property
    def token(self) -> int:
        """The lock's token: see :attr:`Lock.token`."""
        return self._lock.token

    def compensate(self) -> None:
        """Send the undoing tasks of all steps, the last first, each after the one before it.

        Happens by itself when the message is given up. A workflow that was taken back is over.
        """
        self._steps.compensate()

    def __enter__(self) -> Self:
        refuse_lock_in_transaction()
        self._lock.acquire()
        try:
            self._own()
        except BaseException:  # any: else the lock would be taken until its lease ends
            self._lock.release()
            raise
        self._is_inside = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_inside = is_left_half = False
        try:
            if exc is None or isinstance(exc, Ignore):  # the message is done with, in either case
                self._end()
            elif isinstance(exc, Refused) or not self._comes_back:
                is_left_half = self._leave()
        finally:
            self._lock.release()
        if is_left_half:
            self.take_back()

    def _end(self) -> None:
        """Note that the block has ended well.

        Raises:
            Compensated: its steps have been taken back, and not by this run: another delivery of
                the message was given up, or another message that went on with them.
        """
        # Paused for longer than its lease, this run may end while another message is in the
        # workflow: that one's steps have not ended.
        mine, over = self._run.messages, {"ended": True, "working": [], "forsaken": False}
        scope = self._steps.scope.update(
            lambda scope: over if scope.get("owner") in mine else _left(scope, mine)
        )
        self._ended = True
        if scope["state"] != OPEN and scope.get("closed_by") != self._run.id:
            raise Compensated("The steps of this workflow have been taken back")

    def _own(self) -> None:
        _note_scope(self._vault, self._run.message, self._scope)
        mine = {"owner": self._run.message, "lock": self._lock.text}
        listed = [self._run.message] if self._comes_back else []
        scope = self._steps.scope.update(
            lambda scope: mine | {"working": _others(scope, self._run.messages) + listed}
        )
        if scope["state"] != OPEN:
            self._steps.compensate()  # what an earlier run could not send
            raise Compensated("The steps of this workflow have been taken back")
        self._entered_with = self._lock.text

    def take_back(self, *, is_holder_gone: bool = False) -> None:
        """Compensate for a message that is given up, if the scope is still that message's.

        Arguments:
            is_holder_gone: the process of the message's last run is known to have ended. If not,
                a run that has left its lock may still be in a step (its worker is cut off from
                SQS): the steps are undone once its lease is over.

        Raises:
            SafeError: the store is away, or an undoing task could not be sent.
        """
        if self._is_anothers() and not self._leave():
            return
        scope = self._steps.scope.update(partial(self._closing, is_holder_gone))
        if scope["state"] != CLOSING or scope.get("owner") not in self._run.messages:
            return
        # No run of the message goes on; a killed one may have left its lock. Not before the scope
        # is closed: another message would enter, and do the step that may be under way.
        self._lock.steal(scope["lock"])
        try:
            self._lock.acquire()
        except Busy as exc:  # of a run that is about to enter: it sends them, or ends before that
            raise NotDispatched("The tasks that undo the steps are still to be sent") from exc
        try:
            self._steps.compensate()
        finally:
            self._lock.release()

    def _closing(self, is_holder_gone: bool, scope: dict[str, Any]) -> dict[str, Any]:
        """Let no run do a step, if the scope is this message's.

        Of one that has ended well nothing is taken back: another delivery of the message may have
        ended it a moment ago.
        """
        if scope.get("owner") not in self._run.messages or scope.get("ended"):
            return self._forsaken(scope)
        if self._is_overtaken(scope):
            return {}
        until = None if is_holder_gone else self._lock.lease_end(scope["lock"])
        return {"state": CLOSING, "undo_at": until}  # stolen, the lock does not tell any more

    def _is_overtaken(self, scope: dict[str, Any]) -> bool:
        """Whether the message's next run has entered, after a long pause of this one."""
        return bool(self._entered_with) and scope["lock"] not in ("", self._entered_with)

    def _is_anothers(self) -> bool:
        """Whether other messages go on with a scope in which this one, its owner, did nothing."""
        scope, mine = self._steps.scope.read(), self._run.messages
        is_ours = scope.get("owner") in mine and not scope.get("ended")
        if scope["state"] != OPEN or not is_ours or self._is_overtaken(scope):
            return False
        return bool(_others(scope, mine)) and not self._steps.are_of_this_message()

    def _leave(self) -> bool:
        """This message does not go on with the workflow. If another one does, it owns it again.

        Whether this one must take it back: that one was given up while this one was in.
        """
        mine = self._run.messages

        def left(scope: dict[str, Any]) -> dict[str, Any]:
            others = _others(scope, mine)
            is_ours = scope.get("owner") in mine and not scope.get("ended")
            if not (is_ours and others):
                return _left(scope, mine)
            # This run's lock is not that one's, which had ended before.
            return {"owner": others[-1], "working": others, "lock": ""}

        scope = self._steps.scope.update(left)
        return scope.get("owner") in mine and bool(scope.get("forsaken"))

    def _forsaken(self, scope: dict[str, Any]) -> dict[str, Any]:
        """Of a message that is given up while another one owns the workflow: what to note."""
        mine, has_ended = self._run.messages, bool(scope.get("ended"))
        if scope.get("owner") in mine and not has_ended:
            return {}
        left = _left(scope, mine)
        return left and left | {"forsaken": not has_ended}

    def log_if_forgotten(self) -> None:
        """Say which steps of this run nobody takes back, because the store has lost their records.

        Raises:
            StoreUnavailable: it cannot be asked.
        """
        if self.used and not self._ended and "owner" not in self._steps.scope.read():
            logger.error(
                "sqs_backoff.undo_by_hand: the store has lost the records of a workflow whose"
                " steps were done: %s",
                printable(", ".join(sorted(self.used))),
            )


class TakenBack(Enum):
    """What became of the workflows of a message that is given up."""

    #: Nothing is owed any more, or it takes a person.
    DONE = "done"
    #: The workflows are closed, so no run does a step; the undoing tasks are still to be sent.
    OWED = "owed"
    #: The store did not answer: a run could still do steps.
    UNREACHED = "unreached"


def compensate_scopes_of(
    vault: Vault,
    app: Any,
    run: Run,
    *,
    opened: dict[str, Workflow] | None = None,
    is_holder_gone: bool = False,
) -> TakenBack:
    """Take back the workflows of a message that is given up. Does not raise.

    Arguments:
        run: one of the message's, or what stands for it.
        opened: workflows of the run that has ended, by scope, if it was in this process.
        is_holder_gone: as of :meth:`Workflow.take_back`.

    One that cannot be taken back leaves the others be. What could not be done is done when a run
    of the message enters the workflow again, such as after a redrive.
    """

    def take_back(scope: str) -> None:
        workflow = (opened or {}).get(scope)
        if workflow is None:
            workflow = Workflow(vault, scope, app, run, lease=60, namespace="")
        workflow.take_back(is_holder_gone=is_holder_gone)

    scopes: list[str] = []
    taken_back = _outcome(lambda: scopes.extend(_scopes_of(vault, run)))
    for scope in scopes:
        outcome = _outcome(partial(take_back, scope))
        if outcome is TakenBack.UNREACHED:
            return outcome  # nor would it answer for the others, perhaps after a while each
        if outcome is TakenBack.OWED:
            taken_back = outcome
    if taken_back is not TakenBack.UNREACHED:
        for workflow in (opened or {}).values():
            _outcome(workflow.log_if_forgotten)
    return taken_back


def _outcome(take_back: Callable[[], None]) -> TakenBack:
    try:
        take_back()
    except NotDispatched as exc:
        logger.error("sqs_backoff.not_compensated: %s", error_site(exc.__cause__ or exc))
        return TakenBack.OWED
    except StoreUnavailable as exc:
        logger.error("sqs_backoff.not_compensated: %s", error_site(exc.__cause__ or exc))
        return TakenBack.UNREACHED
    except Exception as exc:  # noqa: BLE001  # records that are not ours: planted, or of another secret or cipher
        # Nobody can say what is owed, also later; the dead letter brings a person to it.
        logger.error("sqs_backoff.undo_by_hand: %s", error_site(exc, calls=BUG_CALLS))
    return TakenBack.DONE


def _others(scope: dict[str, Any], mine: tuple[str, ...]) -> list[str]:
    """The other messages that have entered since the workflow ended, and go on with it."""
    return [each for each in scope.get("working", ()) if each not in mine]


def _left(scope: dict[str, Any], mine: tuple[str, ...]) -> dict[str, Any]:
    """What to note of a message that does not go on with the workflow."""
    others = _others(scope, mine)
    return {} if others == scope.get("working", []) else {"working": others}


def refuse_second_use(name: object) -> None:
    """A loop whose steps all have one name would do the first, and skip the others."""
    raise ValueError(
        f"invalid name {name!r}: this run has had a step of that name; give each its own, such as"
        " f'release {funding.pk}'"
    )


def _scopes_at(message: str) -> str:
    return key_of("scopes-of", message)


def _scopes_of(vault: Vault, run: Run) -> list[str]:
    texts = (vault.get(_scopes_at(message)) for message in run.messages)
    listed = (scope for text in texts if text is not None for scope in loads(vault.reveal(text)))
    return list(dict.fromkeys(listed))


def _note_scope(vault: Vault, message: str, scope: str) -> None:
    """List the scope as one that the message works on, for whoever gives the message up."""
    # By its name, by which all of its records are found, and which may be private: hidden.
    at, first = _scopes_at(message), vault.hide(dumps([scope]))
    there = vault.add(at, first, KEEP_SECONDS)
    while there is not None:
        listed = loads(vault.reveal(there))
        listed += [scope] if scope not in listed else []
        new = vault.hide(dumps(listed))
        if settle(vault, at, there, new, KEEP_SECONDS):  # kept anew in either case
            return
        there = vault.add(at, first, KEEP_SECONDS)
