"""The Celery app that a measured worker runs; all of it comes from the environment."""

from __future__ import annotations

import json
import os
from urllib.parse import urlsplit

from celery import Celery

from .tasks import SCENARIOS

__all__ = ["app"]


def _app() -> Celery:
    queue_url = os.environ["BENCH_QUEUE_URL"]
    name = queue_url.rpartition("/")[2]
    app = Celery("benchmarks")
    app.conf.update(
        broker_url=f"sqs://testing:testing@{urlsplit(os.environ['BENCH_ENDPOINT']).netloc}//",
        broker_transport_options={
            "region": "us-east-1",
            "is_secure": False,
            "predefined_queues": {name: {"url": queue_url}},
            **json.loads(os.environ["BENCH_TRANSPORT_OPTIONS"]),
        },
        task_default_queue=name,
        task_ignore_result=True,
        worker_prefetch_multiplier=int(os.environ["BENCH_PREFETCH_MULTIPLIER"]),
        worker_enable_remote_control=False,
    )
    SCENARIOS[os.environ["BENCH_SCENARIO"]](app)
    return app


app = _app()
