"""The mark that a redrive leaves on a message that it sends again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..text import read_json_object

#: The message attribute that a replay adds. It outlives the next dead-lettering, by SQS or by us,
#: both of which keep attributes that are not the dead-letter record.
REPLAY_ATTRIBUTE: Final = "celery-sqs-backoff-replay"

#: Where it goes when the message has ten attributes of its own.
REPLAY_HEADER: Final = "sqs_backoff_replay"

#: Longest mark that is read, because its sender may have written anything.
_MAX_CHARACTERS: Final = 1_000


def replay_of(message: Mapping[str, Any]) -> str | None:
    """Return the ``traceparent`` of the run that failed, which a replayed message names.

    Args:
        message: as ReceiveMessage returned it.
    """
    mark = ((message.get("MessageAttributes") or {}).get(REPLAY_ATTRIBUTE) or {}).get("StringValue")
    is_ours = isinstance(mark, str) and len(mark) <= _MAX_CHARACTERS
    trace = (read_json_object(mark) or {}).get("trace") if is_ours else None
    return trace if isinstance(trace, str) else None
