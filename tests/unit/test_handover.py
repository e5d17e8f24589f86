"""What crosses from the pool's process to the worker's: it is pickled on the way."""

import pickle

import pytest
from billiard.einfo import ExceptionInfo

from celery_sqs_backoff import Outcome
from celery_sqs_backoff.budget import GiveUpReason
from celery_sqs_backoff.delivery import Delivery
from celery_sqs_backoff.handover import (
    DELIVERY_KEY,
    BackoffRetry,
    GiveUp,
    delivery_of,
    give_up_of,
    note_give_up,
)

DELIVERY = Delivery(message_id="m", queue_url="https://sqs.example/1/q", received_at=1.0)


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("no pickle")


class Request:
    def __init__(self, properties):
        self.properties = properties


@pytest.mark.hazard("H6")
def test_a_retry_keeps_its_delay_and_its_cause():
    retry = pickle.loads(pickle.dumps(BackoffRetry(exc=OSError("down"), when=7)))
    assert type(retry) is BackoffRetry
    assert retry.when == 7
    assert "down" in str(retry.exc)


@pytest.mark.hazard("H6")
def test_a_cause_that_does_not_pickle_does_not_keep_the_retry_from_travelling():
    retry = pickle.loads(pickle.dumps(BackoffRetry(exc=Unpicklable("down"), when=7)))
    assert retry.when == 7


def test_the_delivery_travels():
    assert pickle.loads(pickle.dumps(DELIVERY)) == DELIVERY


def test_the_reason_travels_beside_the_failure():
    try:
        raise OSError("down")
    except OSError as exc:
        einfo = ExceptionInfo()
        give_up = GiveUp.because_of(exc, GiveUpReason.RETRY_FOR, Outcome.RETRYABLE)
    note_give_up(einfo, give_up)
    assert give_up_of(pickle.loads(pickle.dumps(einfo))) == give_up
    assert give_up.exception_type == "builtins.OSError"
    assert give_up.exception_message == "down"


def test_an_exception_without_a_text_is_described_all_the_same():
    give_up = GiveUp.because_of(Unprintable(), GiveUpReason.NOT_RETRYABLE, Outcome.UNKNOWN)
    assert give_up.exception_message == "<unprintable: RuntimeError>"


def test_a_failure_that_did_not_pass_through_the_task_has_no_reason():
    assert give_up_of(object()) is None


@pytest.mark.parametrize(
    ("properties", "found"),
    [
        (None, None),
        ({}, None),
        ({"delivery_info": None}, None),
        ({"delivery_info": {DELIVERY_KEY: "forged"}}, None),
        ({"delivery_info": {DELIVERY_KEY: DELIVERY}}, DELIVERY),
    ],
)
def test_a_request_from_another_broker_has_no_delivery(properties, found):
    assert delivery_of(Request(properties)) is found
