"""Tell a test when the worker that it has started is ready, at any log level.

The worker imports this module and then makes a file.
"""

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
