"""When the worker asks SQS for more, and for how much; the event loop is turned by hand."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from botocore.exceptions import NoCredentialsError
from hypothesis import given
from hypothesis import strategies as st

from celery_sqs_backoff.worker import prefetch
from celery_sqs_backoff.worker.keeper import Keeper
from celery_sqs_backoff.worker.pace import Pace
from celery_sqs_backoff.worker.prefetch import LeaseQoS

QUEUE = "q"


class Hub:
    """An event loop whose callbacks run when told; delays are kept to look at."""

    def __init__(self):
        self.callbacks = []
        self.delays = []

    def call_soon(self, callback, *args):
        self.callbacks.append((callback, args))

    def call_later(self, delay, callback, *args):
        self.delays.append(delay)
        self.callbacks.append((callback, args))

    def turn(self):
        callbacks, self.callbacks = self.callbacks, []
        for callback, args in callbacks:
            callback(*args)


class Channel:
    """kombu's channel, as far as the prefetch window touches it, and the SQS behind it."""

    do_restore = False

    def __init__(self):
        self.hub = Hub()
        self._active_queues = [QUEUE]
        self.asked = []
        self.in_the_air = []
        self.fails = None
        self.qos = None

    def asynsqs(self, queue=None):
        return None

    def _get_bulk_async(self, queue, callback):
        if self.fails:
            raise self.fails
        wanted = max(1, min(10, self.qos.can_consume_max_estimate()))
        self.asked.append(wanted)
        self.in_the_air.append((wanted, callback))

    def _loop1(self, queue, messages):
        self.qos.schedule_queue(queue)


class Worker:
    def __init__(self, *, window, processes=2, only_when_idle=False):
        self.channel = Channel()
        self.keeper = Keeper()
        self._tags = itertools.count()
        self.held = []
        self.qos = LeaseQoS(
            self.channel,
            window,
            keeper=self.keeper,
            processes=processes,
            only_when_idle=only_when_idle,
        )
        # A second between two settlements: beside it the calls here take no time.
        self.qos._pace = Pace(clock=itertools.count().__next__)
        self.channel.qos = self.qos

    def begin(self):
        self.qos.schedule_queue(QUEUE)
        self.turn()

    def turn(self):
        """Two turns: what is due soon, and what that puts off for a moment."""
        self.channel.hub.turn()
        self.channel.hub.turn()

    def answer(self, messages=None):
        """SQS answers the oldest call under way, by default with all it may bring."""
        wanted, callback = self.channel.in_the_air.pop(0)
        messages = wanted if messages is None else messages
        for _ in range(messages):
            tag = str(next(self._tags))
            self.qos.append(SimpleNamespace(), tag)
            self.held.append(tag)
        callback(messages)
        self.turn()

    def settle(self, messages):
        for _ in range(messages):
            self.qos.ack(self.held.pop(0))
        self.turn()

    @property
    def under_way(self):
        return len(self.channel.in_the_air)


def test_a_worker_asks_for_no_more_than_its_window():
    worker = Worker(window=8)
    worker.begin()
    assert worker.channel.asked == [8]
    worker.answer()
    assert worker.under_way == 0


def test_it_waits_until_a_batch_is_worth_a_call():
    worker = Worker(window=8, processes=2)
    worker.begin()
    worker.answer()
    worker.settle(5)
    assert worker.under_way == 0
    worker.settle(1)  # those left are with the two processes
    assert worker.channel.asked == [8, 6]


def test_an_empty_answer_is_followed_by_the_next_call():
    worker = Worker(window=8)
    worker.begin()
    worker.answer(0)
    assert worker.under_way == 1


def test_with_a_backlog_and_room_several_calls_are_under_way():
    worker = Worker(window=64)
    worker.begin()
    under_way = []
    for _ in range(12):
        worker.answer()
        worker.settle(10)
        under_way.append(worker.under_way)
    assert under_way[0] == 2
    assert max(under_way) == 3


def test_without_a_backlog_one_call_is_under_way():
    worker = Worker(window=64)
    worker.begin()
    worker.answer(3)
    assert worker.under_way == 1


def test_tasks_shorter_than_a_call_are_counted_on(monkeypatch):
    worker = Worker(window=8)
    worker.begin()
    monkeypatch.setattr(worker.qos._pace, "settled_during_a_call", lambda: 1_000)
    worker.answer()
    assert worker.channel.asked == [8, 10, 6], "two windows, although all places are taken"


def test_a_multiplier_of_one_counts_on_nothing(monkeypatch):
    """Its user wants no message to wait for another."""
    worker = Worker(window=2, processes=2)
    worker.begin()
    monkeypatch.setattr(worker.qos._pace, "settled_during_a_call", lambda: 1_000)
    worker.answer()
    assert (worker.channel.asked, worker.under_way) == ([2], 0)
    worker.settle(1)
    assert worker.channel.asked == [2, 1]


def test_solo_asks_only_when_it_has_nothing_left():
    worker = Worker(window=4, processes=1, only_when_idle=True)
    worker.begin()
    worker.answer()
    worker.settle(3)
    assert worker.under_way == 0
    worker.settle(1)
    assert worker.under_way == 1


def test_nothing_is_asked_for_while_the_keeper_is_behind(monkeypatch):
    worker = Worker(window=8)
    worker.begin()
    worker.answer()
    monkeypatch.setattr(Keeper, "is_behind", True)
    worker.settle(8)
    assert worker.under_way == 0
    monkeypatch.setattr(Keeper, "is_behind", False)
    worker.turn()  # by the safety net
    assert worker.under_way == 1


def test_failing_receives_are_spaced(caplog):
    worker = Worker(window=8)
    worker.channel.fails = NoCredentialsError()
    worker.begin()
    for _ in range(6):
        worker.turn()
    pauses = [delay for delay in worker.channel.hub.delays if delay > prefetch._LINGER_SECONDS]
    assert len(pauses) >= 6
    assert all(0.5 <= pause <= 10 for pause in pauses)
    assert pauses[-1] >= 5
    assert caplog.text.count("receive_failed") == 1


def test_it_goes_on_when_receives_work_again(caplog):
    worker = Worker(window=8)
    worker.channel.fails = NoCredentialsError()
    worker.begin()
    worker.channel.fails = None
    worker.turn()
    assert worker.under_way == 1


def test_a_channel_that_closes_leaves_leased_messages_to_the_keeper():
    worker = Worker(window=8)
    worker.qos.append(SimpleNamespace(sqs_lease=object()), "1")
    worker.qos.restore_at_shutdown = True
    worker.qos._flush()
    worker.qos.restore_unacked_once()
    assert not worker.qos._delivered


@given(
    window=st.integers(2, 80),
    processes=st.integers(1, 8),
    steps=st.lists(st.tuples(st.sampled_from(["answer", "settle"]), st.integers(0, 10))),
)
def test_what_is_held_and_asked_for_never_passes_the_window(window, processes, steps):
    """As long as nothing is counted on: no time passes here, so no pace is known."""
    worker = Worker(window=window, processes=processes)
    worker.qos._pace.settled_during_a_call = lambda: 0
    worker.begin()
    for step, n in steps:
        if step == "answer" and worker.under_way:
            worker.answer(min(n, worker.channel.in_the_air[0][0]))
        elif step == "settle":
            worker.settle(min(n, len(worker.held)))
        asked_for = sum(wanted for wanted, _ in worker.channel.in_the_air)
        assert len(worker.held) + asked_for <= window
    assert worker.under_way or worker.held, "it has not stopped asking"
