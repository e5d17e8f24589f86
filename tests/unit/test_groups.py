"""Message groups of a FIFO queue: who runs when."""

from __future__ import annotations

import threading

import pytest

from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.sqs.queues import Queue
from celery_sqs_backoff.worker.groups import MessageGroups
from celery_sqs_backoff.worker.keeper import Keeper
from celery_sqs_backoff.worker.lease import Lease, State

QUEUE = Queue("https://sqs.example/1/q.fifo")


class Worker:
    """Message groups, an event loop turned by hand, and what has been started."""

    def __init__(self):
        self.keeper = Keeper()
        self.started = []
        self.freed = []
        self._soon = []
        self.groups = MessageGroups(self._soon.append)

    def receive(self, name, group="a", message_id=None):
        """Receive one more message of the same receive, as ``Receiver`` does."""
        lease = Lease(
            calls=None,
            queue=QUEUE,
            message={"ReceiptHandle": name, "Attributes": {"MessageGroupId": group}},
            body="",
            delivery=Delivery(message_id=message_id or name, queue_url=QUEUE.url, received_at=0.0),
            received_at=0.0,
            keeper=self.keeper,
            free=lambda: self.freed.append(name),
        )
        self.keeper.hold(lease)
        if self.keeper.recognise(lease):
            self.groups.pass_over(lease)
        else:
            self.groups.take_turn(lease, lambda: self.started.append(name))
        return lease

    def begin_receive(self):
        of_group_a = {"Attributes": {"MessageGroupId": "a"}}
        self.groups.begin_receive(QUEUE.url, [of_group_a])

    def turn_loop(self):
        while self._soon:
            self._soon.pop(0)()


@pytest.fixture
def worker():
    return Worker()


def test_the_next_starts_when_the_one_before_is_done(worker):
    first, second = worker.receive("1"), worker.receive("2")
    assert worker.started == ["1"]
    first.done()
    assert worker.started == ["1"], "not in the thread that settled it"
    worker.turn_loop()
    assert worker.started == ["1", "2"]
    second.done()
    assert worker.freed == ["1", "2"]


def test_groups_do_not_wait_for_each_other(worker):
    worker.receive("1", group="a")
    worker.receive("2", group="b")
    assert worker.started == ["1", "2"]


def test_a_group_starts_again_from_nothing(worker):
    worker.receive("1").done()
    worker.receive("2")
    assert worker.started == ["1", "2"]


@pytest.mark.parametrize("end", [Lease.release, Lease.lose], ids=["given back", "lost"])
def test_those_behind_a_message_that_comes_back_are_given_back_too(worker, end):
    first, *behind = (worker.receive(name) for name in "123")
    first.handed_to_pool = lambda: True
    end(first)
    worker.turn_loop()
    assert worker.started == ["1"]
    assert [lease.state for lease in behind] == [State.RELEASED, State.RELEASED]
    assert worker.freed == ["1", "2", "3"]
    assert [worker.keeper.memory.times_given_back(name) for name in "123"] == [0, 1, 1]


def test_those_behind_a_message_that_backs_off_come_back_with_it(worker):
    first, *behind = (worker.receive(name) for name in "123")
    first.defer(5)
    worker.turn_loop()
    assert worker.started == ["1"]
    assert {(lease.state, lease.due_at) for lease in behind} == {(State.DEFERRED, first.due_at)}
    assert [worker.keeper.memory.times_given_back(name) for name in "123"] == [0, 1, 1]


def test_who_expects_those_behind_a_hidden_message_is_told_before_they_are_hidden(worker):
    first, *behind = (worker.receive(name) for name in "123")
    told = []
    first.expect_behind = lambda later: told.append((later, later.state))
    first.defer(5)
    late = worker.receive("4")
    assert told == [(later, State.HELD) for later in [*behind, late]]


def test_nobody_is_told_of_those_behind_a_message_that_is_given_back(worker):
    first, *_ = (worker.receive(name) for name in "123")
    told = []
    first.expect_behind = told.append
    first.release()
    assert told == []


def test_a_dead_letter_lets_the_next_go_on(worker):
    first, _ = worker.receive("1"), worker.receive("2")
    first.dead_letter(None)
    worker.turn_loop()
    assert worker.started == ["1", "2"]


@pytest.mark.parametrize("end", [Lease.release, Lease.lose], ids=["given back", "lost"])
def test_one_that_leaves_while_it_waits_takes_those_behind_it_along(worker, end):
    """Otherwise the third would run before the second, which comes back."""
    first, second, third = (worker.receive(name) for name in "123")
    end(second)
    first.done()
    worker.turn_loop()
    assert worker.started == ["1"]
    assert third.state is State.RELEASED
    worker.begin_receive()
    assert worker.receive("2 again").state is State.HELD
    assert worker.started == ["1", "2 again"]


def test_one_that_is_over_while_it_waits_is_passed_over(worker):
    first, second, _ = (worker.receive(name) for name in "123")
    second.done()
    first.done()
    worker.turn_loop()
    assert worker.started == ["1", "3"]


def test_one_that_was_given_back_on_its_way_to_the_loop_does_not_start(worker):
    first, second = worker.receive("1"), worker.receive("2")
    first.done()
    second.release()
    worker.turn_loop()
    assert worker.started == ["1"]
    worker.begin_receive()
    worker.receive("3")
    assert worker.started == ["1", "3"]


def test_one_that_has_its_turn_need_not_wait_for_itself(worker):
    """Its task could not be made: what is done with such a message is done in turn, too."""
    first, _ = worker.receive("1"), worker.receive("2")
    worker.groups.take_turn(first, lambda: worker.started.append("1 again"))
    assert worker.started == ["1", "1 again"]
    first.defer(5)
    assert worker.freed == ["1", "2"]


def test_what_is_given_back_before_its_turn_does_not_stop_its_group(worker, monkeypatch):
    """A worker that reconnects gives back what a poller is just about to send on."""
    take_turn = worker.groups.take_turn

    def given_back_first(lease, start):
        lease.give_back()
        take_turn(lease, start)

    monkeypatch.setattr(worker.groups, "take_turn", given_back_first)
    worker.receive("1")
    monkeypatch.setattr(worker.groups, "take_turn", take_turn)
    worker.begin_receive()
    worker.receive("1 again")
    assert worker.started == ["1 again"]


def test_a_group_waits_for_a_run_that_goes_on_without_its_message(worker):
    """A renewal comes too late, SQS hands the group out again, and the first still runs here."""
    first = worker.receive("1")
    first.handed_to_pool = lambda: True
    first.lose()
    worker.begin_receive()
    second = worker.receive("2")
    worker.turn_loop()
    assert worker.started == ["1"]
    first.done()
    worker.turn_loop()
    assert worker.started == ["1", "2"]
    assert second.state is State.HELD


def test_a_message_that_is_hidden_at_once_closes_its_group_for_this_receive(worker):
    """It was settled before the next of its receive had come to take its turn."""
    first = worker.receive("1")
    first.defer(5)
    second = worker.receive("2")
    assert worker.started == ["1"]
    assert second.due_at == first.due_at
    worker.begin_receive()
    worker.receive("3")
    assert worker.started == ["1", "3"], "later, SQS keeps the order"


def test_what_comes_with_a_message_that_backs_off_already_is_hidden_with_it(worker):
    """SQS never got the backoff, shows the message again, and the next one of its group, too."""
    first = worker.receive("1")
    first.defer(200)
    worker.begin_receive()
    again, second = worker.receive("1 again", message_id="1"), worker.receive("2")
    assert again.state is State.MERGED
    assert worker.started == ["1"]
    assert (second.state, second.due_at) == (State.DEFERRED, first.due_at)


def test_what_comes_with_a_message_that_was_lost_and_still_runs_waits_for_it(worker):
    first = worker.receive("1")
    first.handed_to_pool = lambda: True
    first.lose()
    worker.begin_receive()
    worker.receive("1 again", message_id="1")
    second = worker.receive("2")
    assert first.state is State.HELD
    assert worker.started == ["1"]
    first.done()
    worker.turn_loop()
    assert worker.started == ["1", "2"]
    assert second.state is State.HELD


def test_what_comes_with_a_message_that_is_done_runs(worker):
    worker.receive("1").done()
    worker.begin_receive()
    worker.receive("1 again", message_id="1")
    worker.receive("2")
    assert worker.started == ["1", "2"]


def test_what_is_given_back_once_counts_as_one_receive(worker):
    """At a reconnect each is given back by the worker, and by the one before it in its group."""
    for lease in [worker.receive(name) for name in "123"]:
        lease.give_back()
    assert [worker.keeper.memory.times_given_back(name) for name in "123"] == [1, 1, 1]


class Switching:
    """A lock; after its release number ``at`` another thread is faster than the one that had it."""

    def __init__(self, at, other_thread):
        self._lock, self._left, self._other_thread = threading.Lock(), at, other_thread

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *exc_info):
        self._lock.release()
        self._left -= 1
        if self._left == 0:
            self._other_thread()


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_message_that_backs_off_while_the_next_is_received_is_not_overtaken(worker, at):
    """The poller's thread takes the messages of one receive while the pool runs the first."""
    first = worker.receive("1")
    worker.groups._lock = Switching(at, lambda: first.defer(60))
    second = worker.receive("2")
    first.defer(60)
    worker.turn_loop()
    assert worker.started == ["1"]
    assert second.due_at == first.due_at


@pytest.mark.parametrize("at", [1, 2, 3])
def test_what_is_received_while_the_message_before_it_is_hidden_does_not_overtake(worker, at):
    first = worker.receive("1")
    worker.groups._lock = Switching(at, lambda: worker.receive("2"))
    first.defer(60)
    worker.turn_loop()
    assert worker.started == ["1"]
