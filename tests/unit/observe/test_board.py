"""Workers write what only they know; whoever looks reads all of it."""

import json

import pytest

from celery_sqs_backoff.observe.board import TTL_SECONDS, Board, ProviderNow, QueueNow, WorkerNow
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.store.records import Records
from tests.support.fake_sqs import Clock

ONE = WorkerNow(
    queues={"mails": QueueNow(running=2, waiting=40, dead_letters={"parked": 3})},
    providers=(ProviderNow(provider="mailgun", state="paused", hidden=40),),
)
OTHER = WorkerNow(queues={"mails": QueueNow(running=1, oldest_sent_at=7.5)})


@pytest.fixture
def clock():
    return Clock(1_000.0)


@pytest.fixture
def store(clock):
    return Records(MemoryStore(clock=clock))


def test_each_worker_is_read_with_what_it_has_written_last(store):
    one, other = Board(store), Board(store)
    one.write("w1", OTHER)
    one.write("w1", ONE)
    other.write("w2", OTHER)
    assert Board(store).read() == {"w1": ONE, "w2": OTHER}


def test_a_worker_that_writes_no_more_is_gone_after_a_minute(store, clock):
    board = Board(store)
    board.write("w1", ONE)
    clock.now += TTL_SECONDS
    assert board.read() == {}
    board.write("w1", ONE)
    assert board.read() == {"w1": ONE}
    board.leave("w1")
    assert board.read() == {}


def test_a_worker_that_starts_again_under_its_name_takes_the_record_over(store):
    Board(store).write("w1", OTHER)
    Board(store).write("w1", ONE)
    assert Board(store).read() == {"w1": ONE}


def test_the_list_of_workers_does_not_grow_with_pods_that_are_gone(store, clock):
    for number in range(20):
        Board(store).write(f"pod-{number}", ONE)
        clock.now += TTL_SECONDS
    assert len(Board(store)._workers()) == 1


def test_two_workers_that_join_at_once_are_both_on_the_list(store):
    class Late(Board):
        """Somebody else joins between its look and its write."""

        is_first = True

        def _workers(self):
            found = super()._workers()
            if self.is_first:
                self.is_first = False
                Board(store).write("w2", OTHER)
            return found

    Late(store).write("w1", ONE)
    assert set(Board(store).read()) == {"w1", "w2"}


def test_a_record_of_another_version_is_no_error(store):
    fields = {"queues": {"q": {"running": 1, "new": 2}}, "providers": [], "more": 1}
    assert WorkerNow.from_fields(fields) == WorkerNow(queues={"q": QueueNow(running=1)})
    for other in ({}, {"queues": [], "providers": 3}):
        with pytest.raises(ValueError, match="worker's record"):
            WorkerNow.from_fields(other)


def test_a_record_is_small_whatever_a_worker_calls():
    """With a key, each tenant is a provider."""
    many = WorkerNow(
        providers=tuple(ProviderNow(provider=f"p{n}", state="paused") for n in range(9_000))
    )
    assert len(json.dumps(many.as_fields())) < 10_000


def test_a_provider_that_is_down_is_not_cut_off_behind_many_that_are_well():
    """With a key each tenant's gate is one, those that were not seen for longest first."""
    tenants = [
        ProviderNow(provider="shop", tenant=str(n), state="ok", in_line=n) for n in range(500)
    ]
    paused = ProviderNow(provider="mailgun", state="paused", hidden=2_480)
    recovering = ProviderNow(provider="stripe", state="recovering", rate=2.5)
    fields = WorkerNow(providers=(*tenants, recovering, paused)).as_fields()
    assert WorkerNow.from_fields(fields).providers[:3] == (paused, recovering, tenants[-1])
