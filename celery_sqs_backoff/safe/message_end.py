"""What becomes of a message's workflows when the message ends: given up, or well."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from celery.utils.log import get_task_logger

from ..store.vault import Vault
from ..text import BUG_CALLS, error_site, printable
from .errors import NotDispatched, StoreUnavailable
from .guard import Run
from .scope import scopes_of
from .workflow import Workflow

__all__ = ["TakenBack", "compensate_scopes_of", "leave_scopes_of"]

logger = get_task_logger(__name__)


class TakenBack(Enum):
    """What became of the workflows of a message that is given up."""

    #: Nothing is owed any more, or it takes a person.
    DONE = "done"
    #: The workflows are closed, so no run does a step; the undoing tasks are still to be sent. Or
    #: the message's next run goes on with them.
    OWED = "owed"
    #: The store did not answer: a run could still do steps.
    UNREACHED = "unreached"


def compensate_scopes_of(
    vault: Vault,
    app: Any,
    run: Run,
    *,
    opened: dict[str, Workflow] | None = None,
    is_refused: bool = False,
) -> TakenBack:
    """Take back the workflows of a message that is given up. Does not raise.

    Arguments:
        run: one of the message's that has ended, or what stands for it.
        opened: workflows of the run that has ended, by scope, if it was in this process.
        is_refused: by a guard, which another message has passed.

    One that cannot be taken back leaves the others be. What could not be done is done when a run
    of the message enters the workflow again, such as after a redrive.
    """

    def take_back(scope: str) -> bool:
        workflow = _found(opened, vault, scope, app, run)
        if is_refused:
            workflow.give_way()
            return True
        return workflow.take_back()

    scopes: list[str] = []

    def look_up() -> bool:
        scopes.extend(scopes_of(vault, run.messages))
        return True

    taken_back = _outcome(look_up)
    for scope in scopes:
        outcome = _outcome(partial(take_back, scope))
        if outcome is TakenBack.UNREACHED:
            return outcome  # nor would it answer for the others, perhaps after a while each
        if outcome is TakenBack.OWED:
            taken_back = outcome
    if taken_back is not TakenBack.UNREACHED:
        for workflow in (opened or {}).values():
            _outcome(partial(_log_if_forgotten, workflow))
    return taken_back


def leave_scopes_of(
    vault: Vault, app: Any, run: Run, *, opened: dict[str, Workflow], has_earlier: bool
) -> None:
    """Leave the workflows of a message that ends well without their end. Does not raise.

    Its task has caught the failure, say. Nobody gives the message up, so who does work on them
    must not take it for one that comes back.

    Arguments:
        opened: workflows of this run, by scope.
        has_earlier: whether earlier runs of the message may have entered others.
    """
    try:
        earlier = scopes_of(vault, run.messages) if has_earlier else []
        for scope in dict.fromkeys([*opened, *earlier]):
            _found(opened, vault, scope, app, run).leave()
    except Exception as exc:  # noqa: BLE001  # away, planted, or whatever a user's store raises
        # The work is done, and its result counts.
        logger.error("sqs_backoff.workflow_not_left: %s", error_site(exc.__cause__ or exc))


def _found(
    opened: dict[str, Workflow] | None, vault: Vault, scope: str, app: Any, run: Run
) -> Workflow:
    there = (opened or {}).get(scope)
    return there or Workflow(vault, scope, app, run, lease=60, namespace="")


def _log_if_forgotten(workflow: Workflow) -> bool:
    if names := workflow.forgotten():
        logger.error(
            "sqs_backoff.undo_by_hand: the store has lost the records of a workflow whose"
            " steps were done: %s",
            printable(", ".join(names)),
        )
    return True


def _outcome(take_back: Callable[[], bool]) -> TakenBack:
    try:
        if not take_back():
            logger.warning(
                "sqs_backoff.overtaken: the message's next run has entered its workflow, so the"
                " message is left to that one"
            )
            return TakenBack.OWED
    except NotDispatched as exc:
        logger.error("sqs_backoff.not_compensated: %s", error_site(exc.__cause__ or exc))
        return TakenBack.OWED
    except (StoreUnavailable, SoftTimeLimitExceeded) as exc:  # the latter comes only once
        logger.error("sqs_backoff.not_compensated: %s", error_site(exc.__cause__ or exc))
        return TakenBack.UNREACHED
    except Exception as exc:  # noqa: BLE001  # records that are not ours: planted, or of another secret or cipher
        # Nobody can say what is owed, also later; the dead letter brings a person to it.
        logger.error("sqs_backoff.undo_by_hand: %s", error_site(exc, calls=BUG_CALLS))
    return TakenBack.DONE
