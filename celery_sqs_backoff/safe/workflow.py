"""A workflow: steps under one lock, taken back together when its message is given up.

The scope's record names the message that works on it (``owner``) and the lock that it holds. Who
gives a message up compensates the scopes that this message owns, and no others: a scope that
another message has gone on with is that one's. If a guard refuses that one there, or it is given up
and has begun no step, or ends well without the workflow's end, the scope is the former owner's
again; and if that was given up meanwhile (``forsaken``), the later one compensates.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from celery.canvas import Signature
from celery.exceptions import Ignore

from ..store.vault import Vault
from . import keys
from .errors import Busy, Compensated, NotDispatched, Refused
from .guard import Run
from .lock import Lock, refuse_lock_in_transaction
from .names import text_of
from .scope import CLOSING, OPEN, forsaken, handed_back, left, note_scope, others, owner_of
from .steps import Steps

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Workflow", "refuse_second_use"]


class Workflow:
    """The steps of one business process, one run at a time: what ``self.workflow(...)`` returns.

    Use it with ``with``. Entering takes the lock; each step renews it first.

    Arguments:
        vault: where all is recorded.
        scope: of the business process, such as ``"order:7"``.
        app: the Celery app that sends the steps' tasks.
        run: the run that enters.
        lease: seconds or timedelta above 0 that the lock outlives a killed holder. It must be
            longer than any one step takes.
        namespace: of the idempotency keys.
        is_certain: whether a step's exception says that nothing was done.
        note_act: called once a step has been done, or is in doubt.
        used: names of the steps that the run has had in this scope; they are added to.
    """

    def __init__(
        self,
        vault: Vault,
        scope: str,
        app: Any,
        run: Run,
        *,
        lease: float | timedelta,
        namespace: str,
        is_certain: Callable[[BaseException], bool] = lambda _: False,
        note_act: Callable[[], None] = lambda: None,
        used: set[str] | None = None,
    ) -> None:
        self._vault = vault
        self._scope = scope
        self._namespace = namespace
        self._run = run
        self._lock = Lock(vault, scope, lease=lease)
        self._steps = Steps(vault, scope, app, run, is_certain=is_certain, note_act=note_act)
        self.used: set[str] = set() if used is None else used
        self._has_entered = self._is_inside = self._ended = False

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
        self._is_inside, self._ended = True, False
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
            elif isinstance(exc, Refused) or not self._run.comes_back:
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
            lambda scope: over if scope.get("owner") in mine else left(scope, mine)
        )
        self._ended = True
        if scope["state"] != OPEN and scope.get("closed_by") != self._run.id:
            raise Compensated("The steps of this workflow have been taken back")

    def _own(self) -> None:
        note_scope(self._vault, self._run.message, self._scope)
        mine = {"owner": self._run.message, "run": self._run.id, "lock": self._lock.text}
        listed = [self._run.message] if self._run.comes_back else []
        scope = self._steps.scope.update(
            lambda scope: mine | {"working": others(scope, self._run.messages) + listed}
        )
        if scope["state"] != OPEN:
            self._steps.compensate()  # what an earlier run could not send
            raise Compensated("The steps of this workflow have been taken back")
        self._has_entered = True

    def take_back(self) -> bool:
        """Compensate for a message that is given up, if the scope is still that message's.

        This run has ended. Another that has left its lock may still be in a step (its worker is cut
        off from SQS): the steps are undone once its lease is over.

        Returns:
            whether the message may go. Not if its next run has entered the scope that this one has
            not ended, after a long pause of this one: that run goes on with it and may have to come
            back, or has succeeded.

        Raises:
            SafeError: the store is away, or an undoing task could not be sent.
        """
        if self._is_anothers() and not self._leave():
            return True
        scope = self._steps.scope.update(self._closing)
        if scope["state"] != CLOSING or owner_of(scope) not in self._run.messages:
            is_over = scope["state"] != OPEN or (self._ended and scope.get("ended"))
            return bool(is_over) or not self._is_overtaken(scope)
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
        return True

    def _closing(self, scope: dict[str, Any]) -> dict[str, Any]:
        """Let no run do a step, if the scope is this message's.

        Of one that has ended well nothing is taken back: another delivery of the message may have
        ended it a moment ago.
        """
        mine = self._run.messages
        if owner_of(scope) not in mine or scope.get("ended"):
            return forsaken(scope, mine)
        if self._is_overtaken(scope):
            return {}
        has_ended = scope.get("run") == self._run.id
        until = None if has_ended else self._lock.lease_end(scope["lock"])
        return {"state": CLOSING, "undo_at": until}  # stolen, the lock does not tell any more

    def _is_overtaken(self, scope: dict[str, Any]) -> bool:
        """Whether the message's next run has entered, after a long pause of this one."""
        is_in_it = self._has_entered and scope.get("owner") in self._run.messages
        return is_in_it and scope["lock"] != "" and scope["run"] != self._run.id

    def _is_anothers(self) -> bool:
        """Whether other messages go on with a scope in which this one, its owner, did nothing."""
        scope, mine = self._steps.scope.read(), self._run.messages
        is_ours = owner_of(scope) in mine and not scope.get("ended")
        if scope["state"] != OPEN or not is_ours or self._is_overtaken(scope):
            return False
        return bool(others(scope, mine)) and set(mine).isdisjoint(self._steps.begun_by())

    def leave(self) -> None:
        """The message ends, and does not go on with the workflow, unless this has ended well.

        What an earlier run of it, that was given up, could not send is sent now: no other run will.

        Raises:
            SafeError: as of :meth:`take_back`.
        """
        if not self._ended and (self._leave() or self._steps.scope.read()["state"] == CLOSING):
            self.take_back()

    def give_way(self) -> None:
        """A guard refuses the message: where nothing was begun, the one that has passed may enter.

        Raises:
            SafeError: as of :meth:`take_back`.
        """
        if self._steps.begun_by():
            self.take_back()
        else:
            self.leave()

    def _leave(self) -> bool:
        """This message does not go on with the workflow. If another one does, it owns it again.

        Whether this one must take it back: that one was given up while this one was in.
        """
        mine = self._run.messages
        scope = self._steps.scope.update(partial(handed_back, mine=mine))
        return owner_of(scope) in mine and bool(scope.get("forsaken"))

    def forgotten(self) -> list[str]:
        """Return the steps of this run that nobody takes back: the store has lost their records.

        Raises:
            StoreUnavailable: it cannot be asked.
        """
        is_gone = self.used and not self._ended and "owner" not in self._steps.scope.read()
        return sorted(self.used) if is_gone else []


def refuse_second_use(name: object) -> None:
    """A loop whose steps all have one name would do the first, and skip the others."""
    raise ValueError(
        f"invalid name {name!r}: this run has had a step of that name; give each its own, such as"
        " f'release {funding.pk}'"
    )
