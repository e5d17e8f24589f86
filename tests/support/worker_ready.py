"""Included in a worker, tells the test that has started it when it is ready, at any log level."""

from __future__ import annotations

import os
from pathlib import Path

from celery.signals import worker_ready

READY_MODULE = __name__
READY_FILE_VARIABLE = "TEST_WORKER_READY_FILE"


@worker_ready.connect(weak=False)
def _say_so(**_: object) -> None:
    if path := os.environ.get(READY_FILE_VARIABLE):
        Path(path).touch()
