"""A chord's last part sends its body, also when its process is told to end; or it fails."""

from __future__ import annotations

import time
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final

from celery.exceptions import ChordError

from .handover import RUNNING
from .late_end import report_before_the_end

#: How Celery's backends begin the error of a chord whose parts are done, and whose body they could
#: not send. That of a part that failed begins otherwise.
_BODY_NOT_SENT: Final = "Callback error"

#: What Redis says of a chord that nobody is sending the body of.
_UNCLAIMED: Final = (None, b"done", "done")

_LOOK_SECONDS: Final = 0.5

#: Errors of the part that is being counted.
_UNSENT: ContextVar[list[ChordError] | None] = ContextVar("sqs_unsent_bodies", default=None)


def count_parts_whole(backend: Any) -> None:
    """Send the body of a complete chord, or raise. Does nothing twice.

    All versions: the Redis backend sends the body, and notes in a ``finally`` that it is sent.
    billiard makes a SystemExit of a SIGTERM, so such a chord never ends: seen where a supervisor
    signals the whole process group. The process counts the part, and reports it, first. Where SQS
    refuses the body, the backend stores a FAILURE for it, and lets the part succeed.

    Celery 5.7: whoever sends the body claims the chord for a while. A process that was killed in
    that time still has the claim when its message comes back: without another count, later, nobody
    sends the body.

    Arguments:
        backend: the result backend of this thread.
    """
    count, fail_chord = backend.on_chord_part_return, backend.chord_error_from_stack
    if getattr(count, "_is_wrapped", False):
        return

    @wraps(count)
    def whole(request: Any, *args: Any, **kwargs: Any) -> Any:
        unsent: list[ChordError] = []
        token = _UNSENT.set(unsent)
        try:
            with report_before_the_end():
                result = count(request, *args, **kwargs)
            if _waits_for_a_claim(backend, request.group):
                with report_before_the_end():
                    result = count(request, *args, **kwargs)
        finally:
            _UNSENT.reset(token)
        if unsent:
            raise unsent[0]
        return result

    @wraps(fail_chord)
    def note_unsent(callback: Any, exc: Any = None) -> Any:
        unsent = _UNSENT.get()
        if unsent is not None and isinstance(exc, ChordError) and _is_unsent(exc):
            unsent.append(exc)
        return fail_chord(callback, exc)

    whole._is_wrapped = True  # type: ignore[attr-defined]
    backend.on_chord_part_return = whole
    backend.chord_error_from_stack = note_unsent


def _waits_for_a_claim(backend: Any, group: str | None) -> bool:
    """Wait while the body of a chord is claimed, if this run is a repeated one; say whether it was.

    Only such a run may have lost the claim with its process. The claim ends by itself.
    """
    run = RUNNING.get()
    has_claims = getattr(backend, "_chord_claim_extend_script", None) is not None
    if run is None or not run.delivery.earlier_runs or not group or not has_claims:
        return False
    key, was_claimed = backend.get_key_for_group(group, ".c"), False
    while backend.client.get(key) not in _UNCLAIMED:
        was_claimed = True
        time.sleep(_LOOK_SECONDS)
    return was_claimed


def _is_unsent(error: ChordError) -> bool:
    return str(error).startswith(_BODY_NOT_SENT)
