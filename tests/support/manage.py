"""Run ``manage.py`` of the example project in a process of its own, with a local queue."""

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
    """Run ``manage.py`` with these arguments, and return its output and exit code.

    Arguments:
        endpoint: the URL of the SQS server.
        queue: the queue for the mails of the example project.
        env: further variables of the environment.
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
