"""The records of a project in a store that other projects may also read and write.

With a secret, records are signed, so a record that somebody else has written is rejected.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from cryptography.fernet import Fernet

from celery_sqs_backoff.safe.guard import enter, finish
from celery_sqs_backoff.store.errors import RecordRejected
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.store.records import Records


@pytest.fixture
def store():
    return MemoryStore()


def fields_of(records: Records) -> dict[str, Any]:
    there = records.get("guard", "a")
    assert there is not None
    return there.fields


def test_namespaces(store):
    """Two environments that use the same store do not share records."""
    staging, production = (Records(store, namespace=f"shop-{n}") for n in ("staging", "production"))
    assert staging.add("guard", "a", {"n": 1}, 60).is_new
    assert production.add("guard", "a", {"n": 2}, 60).is_new
    assert fields_of(staging) == {"n": 1}


def test_compare_and_set(store):
    """A record is replaced or deleted only if it has not changed since it was read."""
    records = Records(store, secrets=["one"])
    first = records.add("guard", "a", {"n": 1}, 60)
    assert not records.add("guard", "a", {"n": 2}, 60).is_new
    second = records.replace(first, {"n": 2}, None)
    assert second is not None
    assert records.replace(first, {"n": 3}) is None
    assert not records.delete(first)
    assert records.delete(second)
    assert records.get("guard", "a") is None


@pytest.mark.parametrize("planted", ["made up", 's0::{"state": "done"}', "s1:00:{}", ""])
def test_planted_record(store, planted):
    """A record that somebody else has written is rejected."""
    records = Records(store, namespace="shop", secrets=["one"])
    ours = records.add("guard", "a", {"n": 1}, 60)
    store.replace(ours.key, ours.raw, planted, 60)
    with pytest.raises(RecordRejected):
        records.get("guard", "a")
    with pytest.raises(RecordRejected):
        records.add("guard", "a", {"n": 1}, 60)
    assert records.replace(ours, {"n": 2}) is None


def test_moved_record(store):
    """A record that somebody has copied to another key is rejected."""
    records = Records(store, secrets=["one"])
    ours = records.add("guard", "a", {"n": 1}, 60)
    store.add(records.key("guard", "b"), ours.raw, 60)
    with pytest.raises(RecordRejected):
        records.get("guard", "b")


def test_change_secret(store):
    """The secret can be changed while there are records: for a time, both secrets are valid.

    The keys of records do not depend on the secret, so a message still finds its records.
    """
    old, new, both = (Records(store, secrets=s) for s in (["old"], ["new"], ["new", "old"]))
    old.add("guard", "a", {"n": 1}, 60)
    there = both.get("guard", "a")
    assert there is not None
    assert both.replace(there, {"n": 2}, 60) is not None
    assert fields_of(new) == {"n": 2}
    with pytest.raises(RecordRejected):
        old.get("guard", "a")
    assert both.digest("message", "a", "id") == Records(store).digest("message", "a", "id")


def test_encrypted_record(store):
    """An encrypted record shows neither its state, message and key, nor its result."""
    cipher = Fernet(Fernet.generate_key())
    records = Records(store, namespace="shop", secrets=["one"], cipher=cipher)
    message = records.digest("message", "mail", "task-id")
    finish(records, enter(records, "mail:alice", message, "run", 60), "DE89 3704")
    shown = json.dumps([*store._records.items()])
    assert not any(text in shown for text in ("task-id", "alice", "DE89", "done"))
    assert enter(records, "mail:alice", message, "again", 60).result == "DE89 3704"


def test_switch_encryption(store):
    """Encryption can be switched on while there are records, but it cannot be switched off."""
    plain, sealed = Records(store), Records(store, cipher=Fernet(Fernet.generate_key()))
    record = plain.add("guard", "a", {"n": 1}, 60)
    assert fields_of(sealed) == {"n": 1}
    sealed.replace(record, {"n": 2})
    with pytest.raises(RecordRejected, match="encrypt"):
        plain.get("guard", "a")


def test_repeated_write(store):
    """If the same write is made twice, both succeed.

    A client library repeats a write if the answer to the first one is lost.
    """
    records = Records(store)
    record = records.add("guard", "a", {"n": 1}, 60)
    assert records.replace(record, {"n": 2}) is not None
    assert records.replace(record, {"n": 2}) is not None
    assert records.replace(record, {"n": 3}) is None


@pytest.mark.parametrize("planted", ["[1]", "5", "{", "e1:x"])
def test_invalid_json(store, planted):
    """A record whose content is not a JSON object is rejected, even if records are not signed."""
    records = Records(store)
    store.add(records.key("guard", "a"), f"s0::{planted}", 60)
    with pytest.raises(RecordRejected):
        records.get("guard", "a")
