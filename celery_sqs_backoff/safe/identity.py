"""Whose record is it? The message that is being run, also where one task calls another."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from celery import _state

from .errors import OutsideRun
from .names import input_of

__all__ = [
    "acts_of",
    "begin_again",
    "begin_call",
    "carrier_of",
    "has_copy",
    "has_ended",
    "is_in_a_message",
    "is_running",
    "message_of",
    "note_act",
    "run_id_of",
]


def message_of(task: Any) -> tuple[str, str]:
    """Return the task's name, and an id that is the same whenever its message is run.

    The Celery task id. A task that is called as a function inside another's run belongs to that
    run: its id is made of the outer id, its arguments, and which such call of the run it is.
    Called as a function outside a run, each call has an id of its own.

    Raises:
        OutsideRun: no task is running.
    """
    request = task.request_stack.top
    if request is None:
        raise OutsideRun(
            f"{task.name} is not running: name what the record belongs to, with scope="
        )
    if request.id is not None:
        return str(task.name), str(request.id)
    if not hasattr(request, "sqs_identity"):
        request.sqs_identity = _called_as_a_function(task, request)
    return str(task.name), str(request.sqs_identity)


def begin_call(request: Any) -> None:
    """Note that a task begins, with this request: run for a message, or called as a function.

    Celery copies the request for a call of the task by itself: such a call is another one, and
    counts among the calls of the same run.
    """
    facts = vars(request)
    facts["sqs_is_running"] = True
    facts.pop("sqs_identity", None)
    facts.setdefault("sqs_calls", {})


def begin_again(request: Any) -> None:
    """Note that a task's own ``__call__`` calls its ``run``, perhaps not for the first time.

    What has been done stays noted. The names of its steps are free again, and so are the ids of the
    tasks that it calls as functions: those are counted anew, as by the message's next run. What
    ``__call__`` had done before the first time is not repeated, and keeps its own.
    """
    facts = vars(request)
    steps, calls = facts.setdefault("sqs_steps", {}), facts["sqs_calls"]
    opened = facts.get("sqs_workflows", {})
    used = {scope: set(workflow.used) for scope, workflow in opened.items()}
    first = facts.setdefault("sqs_before_run", (dict(steps), dict(calls), used))
    steps_then, calls_then, used_then = first
    steps.clear()
    steps.update(steps_then)
    calls.clear()
    calls.update(calls_then)
    for scope, workflow in opened.items():
        workflow.used &= used_then.get(scope, set())


def carrier_of(task: Any) -> tuple[str, Any] | None:
    """Return the task whose message is being run, this one or one that has called it.

    By name, with its request; ``None`` outside a message.
    """
    request = task.request_stack.top
    if request is not None and request.id is not None:
        return str(task.name), request
    return _outer()


def is_in_a_message(task: Any) -> bool:
    """Whether a message is being run, by this task or by one that has called it."""
    return carrier_of(task) is not None


def note_act(task: Any) -> None:
    """Note that a step of the message that is being run has been done, or may have been."""
    if (carrier := carrier_of(task)) is not None:
        vars(carrier[1])["sqs_acts"] = acts_of(task) + 1


def acts_of(task: Any) -> int:
    """How many steps this run of the message has done, or may have done."""
    carrier = carrier_of(task)
    return 0 if carrier is None else int(getattr(carrier[1], "sqs_acts", 0))


def is_running(request: Any) -> bool:
    """Whether the task's own code is running for the message of this request."""
    return request.id is not None and getattr(request, "sqs_is_running", False)


def has_ended(request: Any) -> bool:
    """Whether the task's own code has run for the message of this request, and ended."""
    return getattr(request, "sqs_is_running", None) is False


def has_copy(request: Any) -> bool:
    """Whether ``retry()`` has published a copy of the message, which may be running already."""
    return getattr(request, "sqs_copy", None) is not None


def run_id_of(request: Any) -> str:
    """Return an id of this run: another one when the message is delivered again."""
    if request is None:
        return uuid4().hex
    if not hasattr(request, "sqs_run_id"):
        request.sqs_run_id = uuid4().hex
    return str(request.sqs_run_id)


def _called_as_a_function(task: Any, request: Any) -> str:
    found = _outer()
    if found is None:
        return f"direct:{uuid4()}"
    outer = found[1]
    if not hasattr(outer, "sqs_calls"):  # a task without our base class
        outer.sqs_calls = {}
    call = (task.name, input_of(None, tuple(request.args or ()), request.kwargs or {}))
    outer.sqs_calls[call] = outer.sqs_calls.get(call, 0) + 1
    return f"{outer.id} > {call[1]} {outer.sqs_calls[call]}"


def _outer() -> tuple[str, Any] | None:
    """The innermost message that is being run in this thread: the task's name, and its request.

    Not ``celery._state.get_current_worker_task``, which looks at each task's newest request only:
    of a task that calls itself as a function, that is the call.
    """
    above: dict[int, int] = {}
    for task in reversed(_state._task_stack.stack):
        depth = above[id(task)] = above.get(id(task), 0) + 1
        requests = task.request_stack.stack
        if depth <= len(requests) and requests[-depth].id is not None:
            return str(task.name), requests[-depth]
    return None
