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


def test_read_last_write(store):
    """A reader gets the last record of each worker."""
    one, other = Board(store), Board(store)
    one.write("w1", OTHER)
    one.write("w1", ONE)
    other.write("w2", OTHER)
    assert Board(store).read() == {"w1": ONE, "w2": OTHER}


def test_silent_worker(store, clock):
    """A worker that stops writing is gone after a minute, and at once when it leaves."""
    board = Board(store)
    board.write("w1", ONE)
    clock.now += TTL_SECONDS
    assert board.read() == {}
    board.write("w1", ONE)
    assert board.read() == {"w1": ONE}
    board.leave("w1")
    assert board.read() == {}


def test_restart_with_same_name(store):
    """A worker that starts again with its name takes the record over."""
    Board(store).write("w1", OTHER)
    Board(store).write("w1", ONE)
    assert Board(store).read() == {"w1": ONE}


def test_list_is_bounded(store, clock):
    """The list of workers does not grow with pods that are gone."""
    for number in range(20):
        Board(store).write(f"pod-{number}", ONE)
        clock.now += TTL_SECONDS
    assert len(Board(store)._workers()) == 1


def test_join_at_once(store):
    """Two workers that join at the same time are both on the list."""

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


def test_record_of_other_version(store):
    """The board skips fields that it does not know, and records that it cannot read."""
    fields = {"queues": {"q": {"running": 1, "new": 2}}, "providers": [], "more": 1}
    assert WorkerNow.from_fields(fields) == WorkerNow(queues={"q": QueueNow(running=1)})
    board = Board(store)
    board.write("w1", ONE)
    for number, other in enumerate(({}, {"queues": [], "providers": 3}, {"queues": {"q": 7}})):
        board.write(f"other {number}", ONE)
        key = store.key("status", f"worker other {number}")
        assert store.discard(key)
        store.add("status", f"worker other {number}", other, TTL_SECONDS)
    assert board.read() == {"w1": ONE}


def test_foreign_record(clock):
    """The board skips a worker's record that is signed with another secret."""
    store = MemoryStore(clock=clock)
    ours, foreign = (Records(store, secrets=[secret]) for secret in (b"ours", b"foreign"))
    Board(ours).write("w1", ONE)
    Board(ours).write("w2", ONE)
    assert ours.discard(ours.key("status", "worker w2"))
    foreign.add("status", "worker w2", ONE.as_fields(), TTL_SECONDS)
    assert Board(ours).read() == {"w1": ONE}
    Board(ours).write("w3", ONE)
    assert Board(ours).read() == {"w1": ONE, "w3": ONE}


@pytest.mark.parametrize("fields", [{}, {"workers": 3}, {"workers": [7]}], ids=str)
def test_unreadable_list(store, fields):
    """A list of workers that cannot be read counts as empty, and the next write repairs it."""
    store.add("status", "workers", fields, TTL_SECONDS)
    assert Board(store).read() == {}
    Board(store).write("w1", ONE)
    assert Board(store).read() == {"w1": ONE}


def test_record_size():
    """A record is small, however many providers a worker calls.

    With a key, each tenant is a provider.
    """
    many = WorkerNow(
        providers=tuple(ProviderNow(provider=f"p{n}", state="paused") for n in range(9_000))
    )
    assert len(json.dumps(many.as_fields())) < 10_000


def test_most_urgent_providers():
    """A record keeps providers that are down when it has too many providers.

    With a key, each tenant has a gate, and those not used for longest come first.
    """
    tenants = [
        ProviderNow(provider="shop", tenant=str(n), state="ok", in_line=n) for n in range(500)
    ]
    paused = ProviderNow(provider="mailgun", state="paused", hidden=2_480)
    recovering = ProviderNow(provider="stripe", state="recovering", rate=2.5)
    fields = WorkerNow(providers=(*tenants, recovering, paused)).as_fields()
    assert WorkerNow.from_fields(fields).providers[:3] == (paused, recovering, tenants[-1])


def test_state_of_other_version():
    """A state that a newer worker has written comes last, and stops no sqs-status."""
    states = ["new", "ok", "paused"]
    providers = [ProviderNow(provider="mailgun", state=state) for state in states]
    found = sorted(providers, key=lambda one: one.sort_key)
    assert [one.state for one in found] == ["paused", "ok", "new"]
