"""A task costs few calls of our functions, from its receive to its confirmed delete."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import celery_sqs_backoff

#: The limit is for the main process and the pool process together. A real worker makes fewer calls,
#: because the rig looks for work more often than a thread does.
MOST_CALLS = 200

_PACKAGE = str(Path(celery_sqs_backoff.__file__).parent)


def returns(self):
    return None


def test_calls_of_a_success(rig):
    """A successful task costs at most 200 calls of our functions. No call is for failures."""
    calls = Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE):
            calls[f"{Path(code.co_filename).stem}:{code.co_name}"] += 1

    rig.task(returns)
    rig.send()
    rig.run()  # the first run also loads modules and reads the queue's attributes
    rig.send()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        rig.run()
    finally:
        sys.setprofile(before)
    assert calls.total() <= MOST_CALLS, calls.most_common(20)
    assert calls["settle:_carry_out"] == 1
    for computed in ("delivery:standing", "budget:draw_delay", "lease:give_up"):
        assert calls[computed] == 0
