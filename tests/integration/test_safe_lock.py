"""The lock between processes: one holder, and what becomes of it when the holder is killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes import eventually

from .store_peer import Peer
from .stores import Served, served

PEERS = 4


@pytest.fixture(scope="module", params=["postgresql", "redis"])
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp(request.param)
    with served(request.param, directory) as there:
        yield there


@pytest.fixture(scope="module")
def peers(shared: Served) -> Iterator[list[Peer]]:
    with shared.peers(PEERS) as peers:
        yield peers


def test_of_many_processes_one_holds_the_lock(peers: list[Peer]) -> None:
    for race in range(10):
        for peer in peers:
            peer.ask("exclusive", f"race {race}", 60)
        answers = [peer.answer() for peer in peers]
        assert answers.count(True) == 1


def test_a_killed_holders_lock_is_free_when_its_lease_ends(
    shared: Served, peers: list[Peer]
) -> None:
    holder = shared.peer()
    assert holder.answer()
    assert holder.call("exclusive", "killed", 2)
    holder.kill()
    assert not peers[0].call("exclusive", "killed", 60)
    assert eventually(lambda: peers[0].call("exclusive", "killed", 60), timeout=6)
    assert not peers[1].call("exclusive", "killed", 60)


def test_a_holder_that_was_paused_beyond_its_lease_learns_of_it_and_frees_nothing(
    shared: Served, peers: list[Peer]
) -> None:
    holder = shared.peer()
    try:
        assert holder.answer()
        assert holder.call("exclusive", "paused", 1)
        holder.pause()
        holder.ask("renew_then_release", "paused")
        assert eventually(lambda: peers[0].call("exclusive", "paused", 60), timeout=6)
        holder.resume()
        assert holder.answer() is False
        assert not peers[1].call("exclusive", "paused", 60)
    finally:
        holder.kill()


def test_a_fast_clock_does_not_take_a_lock_away(shared: Served) -> None:
    """The server's clock decides."""
    holder, fast = shared.peer(), shared.peer(time_shift="3600")
    try:
        assert holder.answer()
        assert fast.answer()
        assert holder.call("exclusive", "skewed", 60)
        assert not fast.call("exclusive", "skewed", 60)
    finally:
        holder.kill()
        fast.kill()
