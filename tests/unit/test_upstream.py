"""Guards for older versions of Celery and kombu, on stand-ins: so they run with the newest, too."""

from __future__ import annotations

import gc
import json
import threading
from types import SimpleNamespace

import celery
import pytest

from celery_sqs_backoff.worker import upstream
from celery_sqs_backoff.worker.upstream import loop
from tests.support.processes import eventually


class Hub:
    """kombu's event loop before 5.7, as far as it is needed here."""

    def __init__(self):
        self.soon = []
        self.readers = {}

    def call_soon(self, callback, *args):
        self.soon.append((callback, args))

    def add_reader(self, fd, callback):
        self.readers[fd] = callback

    def run(self):
        while self.soon:
            callback, args = self.soon.pop(0)
            callback(*args)


def test_what_another_thread_asks_for_wakes_the_event_loop():
    hub, done = Hub(), []
    upstream.wake_event_loop(hub)
    [(reader, sleep_again)] = hub.readers.items()
    with pytest.raises(BlockingIOError):
        reader.recv(1)
    thread = threading.Thread(target=hub.call_soon, args=(done.append, 1))
    thread.start()
    thread.join()
    sleep_again()
    with pytest.raises(BlockingIOError):
        reader.recv(1)
    hub.run()
    assert done == [1]


def test_a_loop_that_has_ended_need_not_be_woken():
    """A worker that stops gives messages back after its loop has been reset."""
    hub = Hub()
    upstream.wake_event_loop(hub)
    hub.readers.clear()
    gc.collect()
    hub.call_soon(print)
    assert hub.soon == [(print, ())]


class Client:
    """kombu 5.5's HTTP client: it answers when it is allowed to, or raises."""

    Response = SimpleNamespace

    def __init__(self, error=None):
        self.error = error
        self.may_answer = threading.Event()

    def _process_request(self, request):
        self.may_answer.wait(5)
        if self.error is not None:
            raise self.error
        request.on_ready(SimpleNamespace(code=200))


def answers_of(monkeypatch, client):
    hub, answers = Hub(), []
    monkeypatch.setattr(loop, "get_client", lambda hub: client)
    upstream.call_beside_event_loop(hub)
    client.add_request(SimpleNamespace(on_ready=answers.append))
    assert answers == [], "the loop is not blocked"
    return hub, answers


def test_a_call_waits_in_a_thread_and_is_answered_in_the_loop(monkeypatch):
    client = Client()
    hub, answers = answers_of(monkeypatch, client)
    client.may_answer.set()
    eventually(lambda: hub.soon)
    assert answers == []
    hub.run()
    assert [answer.code for answer in answers] == [200]


def test_a_call_that_fails_is_answered_too(monkeypatch):
    client = Client(ValueError("of the message's"))
    hub, answers = answers_of(monkeypatch, client)
    client.may_answer.set()
    eventually(lambda: hub.soon)
    hub.run()
    assert answers[0].code == 599
    assert "of the message's" not in str(answers[0].error)


def test_an_answer_to_a_loop_that_was_reset_is_dropped(monkeypatch):
    client = Client()
    hub, answers = answers_of(monkeypatch, client)
    upstream.call_beside_event_loop(hub)
    client.may_answer.set()
    eventually(lambda: hub.soon)
    hub.run()
    assert answers == []


@pytest.mark.parametrize("body", ["not JSON", "[1]", "3", '{"properties": 3}'])
def test_a_body_that_is_no_json_object_is_a_message_of_somebody_else(body):
    def parse(message, queue_name, queue_url):
        return json.loads(message["Body"])["properties"]["delivery_info"]

    channel = SimpleNamespace(_message_to_python=parse)
    upstream.survive_bodies_without_json(channel)
    message = {"Body": body, "ReceiptHandle": "handle"}
    payload = channel._message_to_python(message, "q", "https://sqs.example/1/q")
    assert payload["body"] == body
    assert payload["properties"]["delivery_tag"] == "handle"
    assert payload["properties"]["delivery_info"]["sqs_message"] is message


class Pool:
    """The prefork pool, whose flush forgets all jobs."""

    def __init__(self, jobs):
        self._pool = SimpleNamespace(_cache=jobs)


Pool.__module__ = "celery.concurrency.prefork"


def job(*, accepted, ready=False):
    return SimpleNamespace(_accepted=accepted, ready=lambda: ready)


@pytest.mark.parametrize(("version", "left"), [((5, 5, 3), {"running"}), ((5, 6, 0), set())])
def test_at_a_lost_connection_the_running_tasks_are_not_forgotten(monkeypatch, version, left):
    monkeypatch.setattr(celery, "VERSION", version)
    jobs = {
        "running": job(accepted=True),
        "ended meanwhile": job(accepted=True, ready=True),
        "waiting": job(accepted=False),
    }
    consumer = SimpleNamespace(pool=Pool(jobs), on_close=jobs.clear)
    upstream.remember_running_tasks(consumer)
    consumer.on_close()
    assert set(jobs) == left
