"""The memory of hidden messages."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from celery_sqs_backoff.provider.recall import MARGIN_SECONDS, Hidden, Memory


def hidden(
    message_id: str, until: float, *, not_before: float = 0.0, group: str | None = None
) -> Hidden:
    return Hidden(message_id, f"handle of {message_id}", "mail", until, not_before, group)


def ids(taken: list[Hidden]) -> list[str]:
    return [message.message_id for message in taken]


def test_the_furthest_due_comes_first() -> None:
    memory = Memory()
    for name, until in (("a", 100.0), ("c", 300.0), ("b", 200.0)):
        assert memory.remember(hidden(name, until), 0.0)
    assert ids(memory.take(2, 0.0)) == ["c", "b"]
    assert ids(memory.take(2, 0.0)) == ["a"]


def test_a_message_near_the_end_of_its_hold_is_left_to_sqs() -> None:
    memory = Memory()
    memory.remember(hidden("a", 100.0), 0.0)
    assert memory.take(1, 100.0 - MARGIN_SECONDS) == []
    assert len(memory) == 0, "and is forgotten"


def test_a_message_is_not_recalled_before_its_time() -> None:
    memory = Memory()
    memory.remember(hidden("a", 100.0, not_before=50.0), 0.0)
    assert memory.take(1, 49.9) == []
    assert memory.waiting(49.9) == 0
    assert memory.waiting(50.0) == 1
    assert ids(memory.take(1, 50.0)) == ["a"]


def test_the_newest_hold_of_a_message_counts() -> None:
    memory = Memory()
    memory.remember(hidden("a", 100.0), 0.0)
    memory.remember(Hidden("a", "newer", "mail", 200.0), 0.0)
    assert [m.handle for m in memory.take(5, 0.0)] == ["newer"]


def test_a_full_memory_forgets_the_message_that_comes_back_soonest() -> None:
    memory = Memory(2)
    assert memory.remember(hidden("a", 100.0), 0.0)
    assert memory.remember(hidden("b", 200.0), 0.0)
    assert not memory.remember(hidden("c", 50.0), 0.0)
    assert memory.remember(hidden("d", 300.0), 0.0)
    assert ids(memory.take(5, 0.0)) == ["d", "b"]


def test_a_full_memory_makes_room_where_holds_have_ended() -> None:
    memory = Memory(1)
    memory.remember(hidden("a", 100.0), 0.0)
    assert memory.remember(hidden("b", 120.0), 98.0)
    assert ids(memory.take(5, 98.0)) == ["b"]


def test_a_group_is_recalled_by_its_first_message() -> None:
    memory = Memory()
    assert memory.remember(hidden("a", 100.0, group="g"), 0.0)
    assert not memory.remember(hidden("b", 200.0, group="g"), 0.0)
    assert memory.remember(hidden("c", 50.0, group="h"), 0.0)
    assert ids(memory.take(5, 0.0)) == ["a", "c"]
    assert memory.remember(hidden("b", 200.0, group="g"), 0.0)


def behind(message_id: str, until: float, group: str = "g") -> Hidden:
    return replace(hidden(message_id, until, group=group), is_behind=True)


def test_those_behind_the_first_of_a_group_are_taken_with_it_in_order() -> None:
    """Also if SQS has confirmed one of them before the first."""
    memory = Memory()
    memory.remember(behind("b", 100.0), 0.0)
    memory.remember(hidden("a", 100.0, group="g"), 0.0)
    memory.remember(behind("c", 100.0), 0.0)
    memory.remember(hidden("other", 90.0), 0.0)
    assert len(memory) == len(list(memory)) == 4
    assert memory.waiting(0.0) == 2, "what is behind another one does not wait for a call"
    assert ids(memory.take(1, 0.0)) == ["a", "b", "c"]
    assert ids(memory.take(1, 0.0)) == ["other"]


def test_those_behind_are_not_taken_without_their_first() -> None:
    memory = Memory()
    memory.remember(behind("b", 100.0), 0.0)
    assert memory.take(5, 0.0) == memory.take_next(5, 0.0) == memory.take_all(0.0) == []
    memory.remember(hidden("a", 100.0, group="g"), 0.0)
    memory.forget("a")
    assert len(memory) == 0, "it has come back by itself, and so do they"
    memory.remember(behind("b", 100.0), 0.0)
    memory.remember(hidden("a", 300.0, group="g"), 50.0)
    assert ids(memory.take(5, 120.0)) == ["a"], "another receive's: its hold has ended"


def test_one_of_those_behind_is_forgotten_alone() -> None:
    memory = Memory()
    for message in (hidden("a", 100.0, group="g"), behind("b", 100.0), behind("c", 100.0)):
        memory.remember(message, 0.0)
    assert memory.forget("b")
    assert not memory.forget("b")
    assert ids(memory.take_all(0.0)) == ["a", "c"]


def test_those_behind_are_bounded_too() -> None:
    memory = Memory(2)
    kept = [memory.remember(behind(name, 100.0, name), 0.0) for name in "abc"]
    assert kept == [True, True, False]
    assert memory.remember(behind("d", 200.0, "d"), 150.0), "the holds of the others have ended"


def test_a_probe_takes_the_message_that_comes_back_first() -> None:
    memory = Memory()
    for name, until in (("a", 100.0), ("b", 50.0)):
        memory.remember(hidden(name, until), 0.0)
    (taken,) = memory.take_next(1, 0.0)
    assert taken.message_id == "b"
    assert len(memory) == 1


def test_what_has_come_back_is_not_counted_whoever_has_received_it() -> None:
    memory = Memory()
    memory.remember(hidden("due", 50.0), 0.0)
    memory.remember(hidden("held back by Retry-After", 60.0, not_before=55.0), 0.0)
    memory.remember(hidden("first", 70.0, group="g"), 0.0)
    memory.remember(replace(hidden("behind", 70.0, group="g"), is_behind=True), 0.0)
    memory.remember(replace(hidden("behind none", 50.0, group="h"), is_behind=True), 0.0)
    assert [memory.count(now) for now in (0.0, 50.0, 60.0, 70.0)] == [5, 3, 2, 0]
    assert list(memory) == []


@given(seed=st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_any_history_keeps_its_promises(seed: int) -> None:
    """Compared with a plain dict: bounded, nothing twice, nothing in doubt, nothing early."""
    rng, memory, model, now = Random(seed), Memory(10), {}, 0.0
    for _ in range(300):
        now += rng.choice([0.0, 1.0, 7.0])
        name = f"m{rng.randrange(20)}"
        step = rng.random()
        if step < 0.6:
            entry = hidden(
                name,
                now + rng.choice([1.0, 20.0, 60.0]),
                not_before=now + rng.choice([0.0, 0.0, 15.0, 90.0]),
                group=rng.choice([None, None, "g"]),
            )
            model.pop(name, None)
            if memory.remember(entry, now):
                model[name] = entry
        elif step < 0.8:
            memory.forget(name)
            model.pop(name, None)
        else:
            waiting = memory.waiting(now)
            taken = memory.take(rng.randrange(4), now)
            assert len(taken) <= waiting or not taken
            for entry in taken:
                assert model.pop(entry.message_id) == entry
                assert entry.not_before <= now < entry.until - MARGIN_SECONDS
        assert len(memory) <= 10
        assert {m.message_id for m in memory} <= set(model)
        groups = [m.group for m in memory if m.group is not None]
        assert len(groups) == len(set(groups))


def test_a_probe_takes_a_message_on_its_last_receive_only_if_there_is_no_other() -> None:
    """If the provider is still down, that one becomes a dead letter."""
    memory = Memory()
    memory.remember(replace(hidden("last", 100.0), next_is_last=True), 0.0)
    for name, until in (("b", 300.0), ("a", 200.0)):
        memory.remember(hidden(name, until), 0.0)
    assert ids(memory.take_next(1, 0.0)) == ["a"]
    assert ids(memory.take_next(2, 0.0)) == ["b", "last"]


def test_what_waited_for_its_time_can_be_probed_with() -> None:
    memory = Memory()
    memory.remember(hidden("a", 1000.0, not_before=30.0), 0.0)
    assert memory.take_next(1, 29.0) == []
    assert ids(memory.take_next(1, 30.0)) == ["a"]


def test_probes_do_not_use_up_the_receives_of_one_message() -> None:
    memory = Memory()
    memory.remember(replace(hidden("often", 100.0), receives=7), 0.0)
    memory.remember(replace(hidden("once", 300.0), receives=1), 0.0)
    memory.remember(replace(hidden("twice", 200.0), receives=2), 0.0)
    assert ids(memory.take_next(2, 0.0)) == ["once", "twice"]


def test_a_message_serves_as_a_probe_only_when_its_own_delay_is_over() -> None:
    memory = Memory()
    memory.remember(replace(hidden("a", 100.0), probe_from=30.0), 0.0)
    assert memory.take_next(1, 29.0) == []
    assert ids(memory.take_next(1, 30.0)) == ["a"]
    memory.remember(replace(hidden("a", 100.0), probe_from=30.0), 0.0)
    assert ids(memory.take(1, 0.0)) == ["a"], "once the provider is back it need not wait"
