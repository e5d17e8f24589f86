"""The Celery app of a measured worker. Its settings come from the environment."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import urlsplit

from celery import Celery

from .tasks import SCENARIOS

__all__ = ["app"]


def _broker() -> dict[str, Any]:
    queue_url = os.environ["BENCH_QUEUE_URL"]
    name = queue_url.rpartition("/")[2]
    if queue_url.startswith("redis:"):
        return {"broker_url": queue_url.rpartition("/")[0], "task_default_queue": name}
    return {
        "broker_url": f"sqs://testing:testing@{urlsplit(os.environ['BENCH_ENDPOINT']).netloc}//",
        "broker_transport_options": {
            "region": "us-east-1",
            "is_secure": False,
            "predefined_queues": {name: {"url": queue_url}},
            **json.loads(os.environ["BENCH_TRANSPORT_OPTIONS"]),
        },
        "task_default_queue": name,
    }


def _app() -> Celery:
    app = Celery("benchmarks")
    app.conf.update(
        **_broker(),
        task_ignore_result=True,
        worker_prefetch_multiplier=int(os.environ["BENCH_PREFETCH_MULTIPLIER"]),
        worker_enable_remote_control=False,
    )
    SCENARIOS[os.environ["BENCH_SCENARIO"]](app)
    return app


app = _app()
