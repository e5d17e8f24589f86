"""Records of one project in a store that others share, read or write."""

from __future__ import annotations

import json

import pytest
from cryptography.fernet import Fernet

from celery_sqs_backoff.safe.guard import enter, finish
from celery_sqs_backoff.store.errors import RecordRejected
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.store.protocol import key_of
from celery_sqs_backoff.store.records import Records
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
    """Names do not depend on it, so a message stays itself."""
    Vault(store, secrets=["old"]).add(KEY, "ours", 60)
    vault = Vault(store, secrets=["new", "old"])
    assert vault.get(KEY) == "ours"
    assert vault.replace(KEY, "ours", "newer", 60)
    assert Vault(store, secrets=["new"]).get(KEY) == "newer"
    with pytest.raises(RecordRejected):
        Vault(store, secrets=["old"]).get(KEY)
    assert vault.digest("message", "a", "id") == Vault(store).digest("message", "a", "id")


def test_the_store_shows_no_record_that_is_encrypted(store: MemoryStore) -> None:
    cipher = Fernet(Fernet.generate_key())
    records = Records(Vault(store, namespace="shop", secrets=["one"]), cipher=cipher)
    message = records.digest("message", "mail", "task-id")
    finish(records, enter(records, "mail:alice", message, "run", 60), "DE89 3704")
    shown = json.dumps(only_record(store))
    assert not any(text in shown for text in ("task-id", "alice", "DE89", "done"))
    assert enter(records, "mail:alice", message, "again", 60).result == "DE89 3704"


def test_encryption_can_be_switched_on_and_not_off(store: MemoryStore) -> None:
    cipher = Fernet(Fernet.generate_key())
    plain, sealed = Records(Vault(store)), Records(Vault(store), cipher=cipher)
    record = plain.add("guard", "a", {"n": 1}, 60)
    assert sealed.get("guard", "a") is not None
    sealed.replace(record, {"n": 2})
    with pytest.raises(RecordRejected, match="encrypt"):
        plain.get("guard", "a")


def test_a_write_whose_answer_was_lost_is_found_to_be_done(store: MemoryStore) -> None:
    """A client library may send a call twice."""
    records = Records(Vault(store))
    record = records.add("guard", "a", {"n": 1}, 60)
    assert records.replace(record, {"n": 2}) is not None
    assert records.replace(record, {"n": 2}) is not None
    assert records.replace(record, {"n": 3}) is None


@pytest.mark.parametrize("planted", ["[1]", "5", "{", "e1:x"])
def test_a_record_that_is_no_json_of_ours_is_rejected(store: MemoryStore, planted: str) -> None:
    records = Records(Vault(store))
    records.vault.add(key_of("guard", "a"), planted, 60)
    with pytest.raises(RecordRejected):
        records.get("guard", "a")


def test_what_stands_for_a_message_cannot_be_confused() -> None:
    vault = Vault(MemoryStore())
    assert vault.digest("message", "a", "bc") != vault.digest("message", "ab", "c")
