"""The doctor finds out to which queue Celery sends a task, for each kind of route."""

from __future__ import annotations

import re
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue, binding

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.doctor.look import facts_of_app
from celery_sqs_backoff.testing import local_sqs_settings

MEDIA = Exchange("media", "direct")


class ByTask:
    """A router that is a class."""

    def route_for_task(self, task: str, args: Any = None, kwargs: Any = None) -> Any:
        return {"queue": "bulk"}


def by_name(name: str, *_: Any, **__: Any) -> str | None:
    return "bulk" if name == "shop.mail" else None


ROUTES = {
    "none": (None, "plain"),
    "dict": ({"shop.mail": {"queue": "bulk"}}, "bulk"),
    "name": ({"shop.mail": "bulk"}, "bulk"),
    "glob": ({"shop.*": "bulk"}, "bulk"),
    "glob of one character": ({"shop.mai?": "bulk"}, "plain"),
    "regex": ({re.compile(r"(shop|x)\..*"): {"queue": "bulk"}}, "bulk"),
    "list of dicts": ([{"shop.ping": "plain"}, {"shop.mail": "bulk"}], "bulk"),
    "list of tuples": (([("shop.mail", "bulk")],), "bulk"),
    "function": (by_name, "bulk"),
    "path of a function": (f"{__name__}.by_name", "bulk"),
    "path of a class": ((f"{__name__}.ByTask",), "bulk"),
    "object": (ByTask(), "bulk"),
    "Queue": ({"shop.mail": {"queue": Queue("bulk")}}, "bulk"),
    "alias": ({"shop.mail": "b"}, "bulk"),
    "no queue": ({"shop.mail": {"queue": None}}, "plain"),
    "routing_key": ({"shop.mail": {"routing_key": "key"}}, "plain"),
    "queue and routing_key": ({"shop.mail": {"queue": "bulk", "routing_key": "x"}}, "bulk"),
    "exchange of the queue": (
        {"shop.mail": {"queue": "bulk", "exchange": "media", "routing_key": "key"}},
        "bulk",
    ),
    "exchange": ({"shop.mail": {"exchange": "media", "routing_key": "key"}}, None),
    "one of several bindings": (
        {"shop.mail": {"queue": "many", "exchange": "media", "routing_key": "c"}},
        "many",
    ),
    "Queue with an exchange": (
        {
            "shop.mail": {
                "queue": Queue("bulk", MEDIA, routing_key="own"),
                "exchange": "media",
                "routing_key": "own",
            }
        },
        "bulk",
    ),
    "decorator: the default exchange": ({"exchange": "plain", "routing_key": "plain"}, "plain"),
}


@pytest.mark.filterwarnings("ignore:(?s).*task attribute is deprecated")
@pytest.mark.parametrize(("routes", "expected"), ROUTES.values(), ids=ROUTES.keys())
def test_routes(sqs_endpoint, sqs, make_queue, routes, expected):
    """A task arrives on the queue that the doctor names.

    If the route names an exchange without a queue, kombu drops the task without an error.
    """
    queues = {"plain": make_queue(), "bulk": make_queue(), "many": make_queue()}
    settings = local_sqs_settings(sqs_endpoint, *queues.values())
    urls = settings["broker_transport_options"]["predefined_queues"]
    settings["broker_transport_options"]["predefined_queues"] = {
        name: urls[queue.name] for name, queue in queues.items()
    }
    app = Celery("routed", set_as_current=False)
    app.conf.update(settings)
    bindings = [binding(MEDIA, routing_key="b"), binding(MEDIA, routing_key="c")]
    is_of_task = isinstance(routes, dict) and "exchange" in routes
    app.conf.update(
        task_default_queue="plain",
        task_queues=[
            Queue("plain"),
            Queue("bulk", MEDIA, routing_key="key", alias="b"),
            Queue("many", bindings),
        ],
        task_routes=None if is_of_task else routes,
    )
    options = routes if is_of_task else {}
    app.task(base=SQSBackoffTask, name="shop.mail", shared=False, **options)(by_name)
    [found] = [task for task in facts_of_app(app).tasks if task.name == "shop.mail"]
    app.tasks["shop.mail"].apply_async(("shop.mail",))
    app.close()
    arrived = [
        name
        for name, queue in queues.items()
        if sqs.get_queue_attributes(
            QueueUrl=queue.url, AttributeNames=["ApproximateNumberOfMessages"]
        )["Attributes"]["ApproximateNumberOfMessages"]
        != "0"
    ]
    assert arrived == ([expected] if expected else [])
    assert (found.queue, found.exchange) == (expected, None if expected else "media")
