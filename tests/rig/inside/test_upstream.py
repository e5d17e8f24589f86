"""Guards against bugs of Celery and kombu.

The tests use stand-ins for Celery's classes, so they also test guards for older versions.
"""

from __future__ import annotations

import gc
import select
import threading
from types import SimpleNamespace

import kombu.asynchronous
import pytest
from celery.bootsteps import Blueprint

from celery_sqs_backoff.worker import upstream


class Hub:
    """A stand-in for kombu's event loop before 5.7."""

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


def test_wake_from_another_thread():
    """A callback that another thread schedules wakes the event loop."""
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


def test_wake_from_loop():
    """A callback that the loop's own thread schedules also wakes the event loop.

    kombu 5.7 itself wakes the loop only for other threads.
    """
    hub = kombu.asynchronous.Hub()
    try:
        upstream.wake_event_loop(hub)
        [fd] = hub.readers
        hub._loop_thread = threading.get_ident()
        hub.call_soon(print)
        assert select.select([fd], [], [], 0)[0] == [fd]
    finally:
        hub.close()


def test_loop_not_reset():
    """If the worker starts twice on one event loop, the loop drops the first waker.

    Otherwise the loop would turn without a pause. This happens if a later step of the worker fails
    to start.
    """
    hub = kombu.asynchronous.Hub()
    try:
        upstream.wake_event_loop(hub)
        upstream.wake_event_loop(hub)
        gc.collect(1)  # only young objects, because a full collection takes seconds
        first, second = hub.readers
        assert select.select([first, second], [], [], 0)[0] == [first]
        callback, args = hub.readers[first]
        callback(*args)
        assert [*hub.readers] == [second]
    finally:
        hub.close()


def test_loop_ended():
    """A callback for a loop that has ended is scheduled, and no wake-up fails.

    A worker that stops gives messages back after its loop was reset.
    """
    hub = Hub()
    upstream.wake_event_loop(hub)
    hub.readers.clear()
    gc.collect(1)  # only young objects, because a full collection takes seconds
    hub.call_soon(print)
    assert hub.soon == [(print, ())]


class FakeChannel:
    """A stand-in for kombu's channel."""

    def __init__(self):
        self._tag_to_queue = {}
        self.polled = []

    def basic_consume(self, queue, no_ack, callback, consumer_tag):
        self._tag_to_queue[consumer_tag] = queue
        self._schedule_queue(queue)

    def basic_cancel(self, consumer_tag):
        self._tag_to_queue.pop(consumer_tag, None)

    def _schedule_queue(self, queue):
        self.polled.append(queue)


def test_receive_ourselves():
    """kombu does not receive from queues. It tells the worker which queues Celery consumes."""
    channel, told = FakeChannel(), []
    upstream.receive_ourselves(
        channel,
        on_consume=lambda queue: told.append(("consume", queue)),
        on_cancel=lambda queue: told.append(("cancel", queue)),
        drain_events=lambda: told.append("drain"),
    )
    channel.basic_consume("a", False, print, "tag")
    channel.basic_cancel("tag")
    channel.basic_cancel("tag")
    channel.drain_events(timeout=1, callback=print)
    assert channel.polled == []
    assert told == [("consume", "a"), ("cancel", "a"), "drain"]


@pytest.mark.parametrize("no_ack", [False, True])
def test_no_ack(no_ack):
    """kombu does not keep or delete a message.

    When the channel closes, kombu would let SQS show each message again that it keeps.
    """
    consumed, of_all_channels = [], set()

    def consume(queue, no_ack, **_):
        consumed.append((queue, no_ack))
        of_all_channels.add(queue)

    channel = SimpleNamespace(
        basic_consume=consume, basic_cancel=print, _noack_queues=of_all_channels
    )
    nothing = [].append
    upstream.receive_ourselves(channel, on_consume=nothing, on_cancel=nothing, drain_events=dict)
    channel.basic_consume(queue="a", no_ack=no_ack, callback=print, consumer_tag="tag")
    assert (consumed, of_all_channels) == ([("a", True)], set())


def test_declare_without_asking():
    """kombu declares a queue without asking SQS for its length."""
    channel = SimpleNamespace(_size=lambda queue: 1 / 0)
    consumer = SimpleNamespace(connect=lambda: SimpleNamespace(default_channel=channel))
    upstream.declare_without_asking(consumer)
    assert consumer.connect().default_channel._size("q") == 0


@pytest.mark.parametrize(
    ("is_ours", "fits", "ran"),
    [(True, True, True), (True, False, False), (False, True, False)],
    ids=["ours", "the pool cannot take it", "given back"],
)
def test_task_not_started(is_ours, fits, ran):
    """If a task does not start, the guard tells Celery that a process is free.

    Otherwise Celery would count one free process too few.
    """
    freed, started, refused = [], [], []
    controller = SimpleNamespace(
        _process_task=lambda request: started.append(request) if fits else 1 / 0,
        _quick_release=lambda: freed.append(1),
    )
    upstream.start_nothing_given_back(
        controller, lambda _: is_ours, lambda _, exc: refused.append(type(exc).__name__)
    )
    controller._process_task("request")
    assert (len(started), len(freed)) == (int(ran), int(not ran))
    assert refused == ([] if fits else ["ZeroDivisionError"])


class Pool:
    """A stand-in for Celery's prefork pool, with the jobs that billiard's pool keeps in a cache."""

    def __init__(self, jobs):
        self._pool = SimpleNamespace(_cache=jobs)


Pool.__module__ = "celery.concurrency.prefork"


def job(*, accepted, ready=False, process=None):
    return SimpleNamespace(_accepted=accepted, _write_to=process, ready=lambda: ready)


@pytest.mark.parametrize(
    "close",
    [lambda consumer: consumer.on_close(), lambda consumer: consumer.blueprint.close(consumer)],
    ids=["lost connection", "stop"],
)
def test_tasks_of_processes(close):
    """When Celery's consumer closes, the pool does not forget the tasks that its processes have.

    Otherwise the worker would not read their results, and the tasks would run again.
    """
    jobs = {
        "running": job(accepted=True, process="p"),
        "ended meanwhile": job(accepted=True, ready=True, process="p"),
        "sent to a process": job(accepted=False, process="p"),
        "waiting": job(accepted=False),
    }
    blueprint = Blueprint(on_close=jobs.clear)
    consumer = SimpleNamespace(pool=Pool(jobs), on_close=jobs.clear, blueprint=blueprint, steps=[])
    upstream.remember_running_tasks(consumer)
    close(consumer)
    assert set(jobs) == {"running", "sent to a process"}


def test_cold_shutdown():
    """The consumer closes even if a cold shutdown has already ended the pool.

    Otherwise Celery would not stop the consumer's steps, and ours would go on receiving messages.
    """
    closed = []
    consumer = SimpleNamespace(
        pool=Pool({}), on_close=lambda: closed.append(1), blueprint=SimpleNamespace()
    )
    upstream.remember_running_tasks(consumer)
    consumer.pool._pool = None
    consumer.blueprint.on_close()
    assert closed == [1]


def make_pool(module, **facts):
    """Return an instance of a user's subclass of one of Celery's pools."""
    base = type("TaskPool", (), {"__module__": f"celery.concurrency.{module}"})
    pool = type("MyPool", (base,), {"__module__": "shop.pools"})()
    vars(pool).update(facts)
    return pool


def test_idle_gevent_pool():
    """An idle gevent pool counts as many places as it may have greenlets.

    Before 5.7, Celery gives the number of running greenlets instead, so no second task would start.
    """
    assert upstream.pool_size(make_pool("gevent", limit=200, num_processes=0)) == 200


def test_grown_pool():
    """A pool that has grown counts as many places as it has processes."""
    assert upstream.pool_size(make_pool("prefork", limit=2, num_processes=5)) == 5


def test_subclass_of_pool():
    """A user's subclass of one of Celery's pools counts as that pool."""
    assert upstream.is_pool_of(make_pool("gevent"), "gevent")
    assert not upstream.is_pool_of(make_pool("gevent"), "prefork")


def test_soft_shutdown_without_thread(monkeypatch):
    """A soft shutdown works even if the thread that gives messages back cannot start."""

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    waited = []
    controller = SimpleNamespace(wait_for_soft_shutdown=lambda: waited.append(1))
    upstream.give_back_before_soft_shutdown(SimpleNamespace(controller=controller), lambda: None)
    controller.wait_for_soft_shutdown()
    assert waited == [1]
