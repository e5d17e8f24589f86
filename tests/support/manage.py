"""Runs the example project's ``manage.py``, in a process of its own, against a local queue."""

from __future__ import annotations

import os
import subprocess
import sys
from urllib.parse import urlsplit

from celery_sqs_backoff.testing import LocalQueue

from .workers import ROOT


def run_manage(
    *arguments: str, endpoint: str, queue: LocalQueue, **env: str
) -> subprocess.CompletedProcess[str]:
    """Return how it ended.

    Arguments:
        endpoint: URL of the SQS server.
        queue: of the example project's mails.
        env: added to the environment.
    """
    here = {
        "BROKER_URL": f"sqs://testing:testing@{urlsplit(endpoint).netloc}",
        "MAILS_QUEUE_URL": queue.url,
    }
    return subprocess.run(
        [sys.executable, "-m", "example_project.manage", *arguments],
        cwd=ROOT,
        env=os.environ | here | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
