"""Records of one project in a store that others share, read or write."""

from __future__ import annotations

import json

import pytest
from cryptography.fernet import Fernet

from celery_sqs_backoff.safe import OtherInput, RecordRejected
from celery_sqs_backoff.safe.guard import Run, enter, finish, unset
from celery_sqs_backoff.safe.scope import Scope, scope_key
from celery_sqs_backoff.safe.writes import increment, number
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.store.protocol import key_of
from celery_sqs_backoff.store.vault import Vault

KEY = key_of("guard", "mail:7")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def only_record(store: MemoryStore) -> tuple[str, str]:
    [(key, (value, _))] = store._records.items()
    return key, value


def test_two_environments_on_one_store_do_not_meet(store: MemoryStore) -> None:
    staging, production = (Vault(store, namespace=f"shop-{n}") for n in ("staging", "production"))
    assert staging.add(KEY, "a", 60) is None
    assert production.add(KEY, "b", 60) is None
    assert staging.get(KEY) == "a"


def test_a_vault_keeps_to_the_four_methods(store: MemoryStore) -> None:
    vault = Vault(store, namespace="shop", secrets=["one"])
    assert vault.add(KEY, "a", 60) is None
    assert vault.add(KEY, "b", 60) == "a"
    assert not vault.replace(KEY, "b", "c", 60)
    assert vault.replace(KEY, "a", "c", None)
    assert not vault.delete(KEY, "a")
    assert vault.delete(KEY, "c")
    assert vault.get(KEY) is None
    assert [increment(vault, "counter:1") for _ in range(3)] == [1, 2, 3]
    assert number(vault, "counter:1") == 3


@pytest.mark.parametrize("planted", ["made up", 's0::{"state": "done"}', "s1:00:made up", ""])
def test_a_record_that_somebody_else_wrote_is_rejected(store: MemoryStore, planted: str) -> None:
    vault = Vault(store, namespace="shop", secrets=["one"])
    vault.add(KEY, "ours", 60)
    at, ours = only_record(store)
    store.replace(at, ours, planted, 60)
    with pytest.raises(RecordRejected):
        vault.get(KEY)
    with pytest.raises(RecordRejected):
        vault.add(KEY, "ours", 60)
    assert not vault.replace(KEY, "ours", "new", 60)


def test_a_record_moved_to_another_key_is_rejected(store: MemoryStore) -> None:
    vault = Vault(store, namespace="shop", secrets=["one"])
    vault.add(KEY, "ours", 60)
    _, ours = only_record(store)
    store._records.clear()
    other = key_of("guard", "mail:8")
    vault.add(other, "x", 60)
    at, x = only_record(store)
    store.replace(at, x, ours, 60)
    with pytest.raises(RecordRejected):
        vault.get(other)


def test_a_secret_can_be_changed(store: MemoryStore) -> None:
    Vault(store, secrets=["old"]).add(KEY, "ours", 60)
    vault = Vault(store, secrets=["new", "old"])
    assert vault.get(KEY) == "ours"
    assert vault.replace(KEY, "ours", "newer", 60)
    assert Vault(store, secrets=["new"]).get(KEY) == "newer"
    with pytest.raises(RecordRejected):
        Vault(store, secrets=["old"]).get(KEY)


def test_the_store_shows_neither_ids_nor_arguments_nor_encrypted_results(
    store: MemoryStore,
) -> None:
    vault = Vault(store, namespace="shop", secrets=["one"], cipher=Fernet(Fernet.generate_key()))
    message, given = vault.digest("message", "mail", "task-id"), vault.digest("input", '["alice"]')
    finish(vault, enter(vault, "mail:alice", Run(message, "run", given), 60), "DE89 3704")
    shown = json.dumps(only_record(store))
    assert not any(text in shown for text in ("task-id", "alice", "DE89"))
    assert enter(vault, "mail:alice", Run(message, "again", given), 60).result == "DE89 3704"


def test_what_stands_for_a_message_cannot_be_confused() -> None:
    vault = Vault(MemoryStore())
    assert vault.digest("message", "a", "bc") != vault.digest("message", "ab", "c")


def test_a_guards_record_of_before_a_change_of_the_secret_is_marked_by_the_next_run(
    store: MemoryStore,
) -> None:
    """Whichever of the two runs fails, the other may have done the work."""
    old, new = Vault(store, secrets=["old"]), Vault(store, secrets=["new", "old"])
    first = enter(old, "mail:7", Run.of(old, "mail", "id", "run 1").given(["x"]), 60)
    second = enter(new, "mail:7", Run.of(new, "mail", "id", "run 2").given(["y", "x"]), 60)
    assert (first.is_ours, second.is_ours) == (True, False)
    assert not unset(old, first)
    with pytest.raises(OtherInput):
        enter(new, "mail:7", Run.of(new, "mail", "id", "run 3").given(["z", "y"]), 60)
    finish(new, second, "sent")
    third = enter(new, "mail:7", Run.of(new, "mail", "id", "run 4").given(["y", "x"]), 60)
    assert third.result == "sent"


@pytest.mark.parametrize(
    "planted", ['{"steps":[],"state":"open"}', '{"state": "open", "steps": []}']
)
def test_a_scope_that_somebody_else_wrote_in_another_way_stops_no_run(
    store: MemoryStore, planted: str
) -> None:
    vault = Vault(store)
    scope = Scope(vault, "order:7")
    vault.add(scope_key("order:7"), planted, 60)
    asked = []

    def changes(there: object) -> dict[str, object]:
        asked.append(there)
        assert len(asked) < 5, "it goes on for ever"
        return {"owner": "me"}

    assert scope.update(changes)["owner"] == "me"
