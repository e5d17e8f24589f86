"""If Celery has another name for a queue than SQS, the metrics use SQS's name."""

import re
import urllib.request

from celery import Celery

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.testing import LocalQueue, on_local_sqs, running_worker
from tests.support.processes import eventually, free_port


def test_one_queue_name(sqs_server, sqs_queue):
    """All metrics of a queue have the same queue name, even if the queue has an alias in Celery."""
    alias = LocalQueue(name="mails", url=sqs_queue.url, arn=sqs_queue.arn, dlq=sqs_queue.dlq)
    app = Celery("aliased", set_as_current=False)
    ran = []

    @app.task(base=SQSBackoffTask, name="aliased.task", shared=False)
    def task():
        ran.append(1)

    port = free_port()
    with on_local_sqs(app, sqs_server, alias):
        app.conf.sqs_backoff = {**app.conf.sqs_backoff, "prometheus_port": port}
        with running_worker(app):
            task.delay()
            eventually(lambda: ran, timeout=20)
            url = f"http://127.0.0.1:{port}/metrics"

            def scrape():
                return urllib.request.urlopen(url, timeout=5).read().decode()

            text = eventually(
                lambda: "sqs_backoff_runs_total{" in (now := scrape()) and now, timeout=20
            )
    assert set(re.findall(r'queue="([^"]*)"', text)) == {sqs_queue.name}
