"""Records of one project in a store that others share, read or write."""

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


def test_two_environments_on_one_store_do_not_meet(store):
    staging, production = (Records(store, namespace=f"shop-{n}") for n in ("staging", "production"))
    assert staging.add("guard", "a", {"n": 1}, 60).is_new
    assert production.add("guard", "a", {"n": 2}, 60).is_new
    assert fields_of(staging) == {"n": 1}


def test_only_the_record_that_was_read_is_replaced_or_deleted(store):
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
def test_a_record_that_somebody_else_wrote_is_rejected(store, planted):
    records = Records(store, namespace="shop", secrets=["one"])
    ours = records.add("guard", "a", {"n": 1}, 60)
    store.replace(ours.key, ours.raw, planted, 60)
    with pytest.raises(RecordRejected):
        records.get("guard", "a")
    with pytest.raises(RecordRejected):
        records.add("guard", "a", {"n": 1}, 60)
    assert records.replace(ours, {"n": 2}) is None


def test_a_record_moved_to_another_key_is_rejected(store):
    records = Records(store, secrets=["one"])
    ours = records.add("guard", "a", {"n": 1}, 60)
    store.add(records.key("guard", "b"), ours.raw, 60)
    with pytest.raises(RecordRejected):
        records.get("guard", "b")


def test_a_secret_can_be_changed(store):
    """Names do not depend on it, so a message stays itself."""
    old, new, both = (Records(store, secrets=s) for s in (["old"], ["new"], ["new", "old"]))
    old.add("guard", "a", {"n": 1}, 60)
    there = both.get("guard", "a")
    assert there is not None
    assert both.replace(there, {"n": 2}, 60) is not None
    assert fields_of(new) == {"n": 2}
    with pytest.raises(RecordRejected):
        old.get("guard", "a")
    assert both.digest("message", "a", "id") == Records(store).digest("message", "a", "id")


def test_the_store_shows_no_record_that_is_encrypted(store):
    cipher = Fernet(Fernet.generate_key())
    records = Records(store, namespace="shop", secrets=["one"], cipher=cipher)
    message = records.digest("message", "mail", "task-id")
    finish(records, enter(records, "mail:alice", message, "run", 60), "DE89 3704")
    shown = json.dumps([*store._records.items()])
    assert not any(text in shown for text in ("task-id", "alice", "DE89", "done"))
    assert enter(records, "mail:alice", message, "again", 60).result == "DE89 3704"


def test_encryption_can_be_switched_on_and_not_off(store):
    plain, sealed = Records(store), Records(store, cipher=Fernet(Fernet.generate_key()))
    record = plain.add("guard", "a", {"n": 1}, 60)
    assert fields_of(sealed) == {"n": 1}
    sealed.replace(record, {"n": 2})
    with pytest.raises(RecordRejected, match="encrypt"):
        plain.get("guard", "a")


def test_a_write_whose_answer_was_lost_is_found_to_be_done(store):
    """A client library may send a call twice."""
    records = Records(store)
    record = records.add("guard", "a", {"n": 1}, 60)
    assert records.replace(record, {"n": 2}) is not None
    assert records.replace(record, {"n": 2}) is not None
    assert records.replace(record, {"n": 3}) is None


@pytest.mark.parametrize("planted", ["[1]", "5", "{", "e1:x"])
def test_a_record_that_is_no_json_of_ours_is_rejected(store, planted):
    records = Records(store)
    store.add(records.key("guard", "a"), f"s0::{planted}", 60)
    with pytest.raises(RecordRejected):
        records.get("guard", "a")
