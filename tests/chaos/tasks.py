"""The Celery app of the workers in a chaos run. Its task follows a plan, and notes each run."""

from __future__ import annotations

import os
import time
from typing import Any, NoReturn
from uuid import uuid4

from billiard.process import current_process

from celery_sqs_backoff import FullJitter, SQSBackoffTask
from tests.acceptance.stage import app_of_this_module
from tests.support.record import note

TASK_NAME = "chaos.act"

app = app_of_this_module()


class ProviderDown(Exception):
    pass


@app.task(
    base=SQSBackoffTask,
    bind=True,
    name=TASK_NAME,
    retry_on=(ProviderDown,),
    backoff=FullJitter(base=1, cap=3),
    retry_for=None,
)
def act(self: Any, behaviour: str, times: int, seconds: float) -> None:
    request = self.request
    message = request.properties["delivery_info"]["sqs_message"]
    run = uuid4().hex
    note(
        what="start",
        run=run,
        task_id=request.id,
        message_id=message["MessageId"],
        handle=message["ReceiptHandle"],
        worker=_main_process(),
    )
    time.sleep(seconds)
    if behaviour == "retry" and request.retries < times:
        note(what="retry", run=run)
        raise ProviderDown
    if behaviour == "crash" and request.retries < times:
        note(what="crash", run=run)
        _crash()
    if behaviour == "fail":
        note(what="fail", run=run)
        raise ValueError("for good")
    note(what="success", run=run)


def _main_process() -> int:
    """Return the id of the worker's main process, which may be this one."""
    return current_process()._parent_pid or os.getpid()


def _crash() -> NoReturn:
    if current_process()._parent_pid:
        os._exit(1)
    raise SystemExit(1)  # in the threads pool, all tasks share this process
