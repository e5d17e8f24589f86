"""What a failure means: who is asked, in which order, and what a broken classifier cannot do."""

import dataclasses
import logging
import math
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from celery_sqs_backoff.retry.outcomes import NonRetryable, Outcome, Retryable, Verdict, judge
from tests.support.cases import cases

RETRYABLE = Verdict(Outcome.RETRYABLE)
NOT_PROCESSED = Verdict(Outcome.NOT_PROCESSED)
UNKNOWN = Verdict(Outcome.UNKNOWN)

SECRET = "customer-4711"


class ProviderDown(Exception):
    pass


class ProviderDownForGood(ProviderDown):
    pass


def says(answer: Any) -> Callable[..., Any]:
    return lambda exc: answer


def raises(error: BaseException) -> Callable[[BaseException], Any]:
    def classifier(exc: BaseException) -> Any:
        raise error

    return classifier


# The order


@cases(
    "exc rules expected",
    {
        "nobody has classified it": (ProviderDown(), {}, None),
        "not on the allow list": (ProviderDown(), {"retry_on": (OSError, ValueError)}, None),
        "allow list": (ProviderDown(), {"retry_on": (OSError, ProviderDown)}, RETRYABLE),
        "a subclass counts": (ProviderDownForGood(), {"retry_on": (ProviderDown,)}, RETRYABLE),
        "a base class not": (ProviderDown(), {"retry_on": (ProviderDownForGood,)}, None),
        "the deny list comes before the allow list": (
            ProviderDownForGood(),
            {"retry_on": (ProviderDown,), "never_retry": (ProviderDownForGood,)},
            None,
        ),
        "a classifier comes before the deny list": (
            ProviderDown(),
            {"classify": (says(Outcome.RETRYABLE),), "never_retry": (ProviderDown,)},
            RETRYABLE,
        ),
        "a classifier comes before the allow list": (
            ProviderDown(),
            {"classify": (says(Outcome.NOT_PROCESSED),), "retry_on": (ProviderDown,)},
            NOT_PROCESSED,
        ),
        "a classifier's UNKNOWN is an answer": (
            ProviderDown(),
            {"classify": (says(Outcome.UNKNOWN),), "retry_on": (ProviderDown,)},
            UNKNOWN,
        ),
        "the first classifier that knows it has the say": (
            ProviderDown(),
            {"classify": (says(None), says(NOT_PROCESSED), says(RETRYABLE))},
            NOT_PROCESSED,
        ),
        "no classifier knows it: the lists are asked": (
            ProviderDown(),
            {"classify": (says(None),), "retry_on": (ProviderDown,)},
            RETRYABLE,
        ),
        "a classifier's verdict is kept whole": (
            ProviderDown(),
            {"classify": (says(Verdict(Outcome.RETRYABLE, retry_after=30)),)},
            Verdict(Outcome.RETRYABLE, retry_after=30),
        ),
        "Retryable speaks first": (
            Retryable("later", retry_after=5),
            {"classify": (says(Outcome.UNKNOWN),), "never_retry": (Retryable,)},
            Verdict(Outcome.RETRYABLE, retry_after=5),
        ),
        "NonRetryable speaks first": (
            NonRetryable("never"),
            {"classify": (says(Outcome.RETRYABLE),), "retry_on": (NonRetryable,)},
            UNKNOWN,
        ),
        "NonRetryable that is safe to undo": (
            NonRetryable("never", not_processed=True),
            {"retry_on": (Exception,)},
            NOT_PROCESSED,
        ),
    },
)
def test_precedence(exc, rules, expected):
    """The first rule that knows the failure decides its outcome."""
    assert judge(exc, **rules) == expected


@pytest.mark.parametrize("explicit", [True, False], ids=["raise from", "raise while handling"])
def test_retryable_cause(explicit):
    """A retryable cause does not make the error around it retryable.

    The outer error may have happened after the work was done.
    """
    outer = ValueError("wrapped")
    if explicit:
        outer.__cause__ = ProviderDown()
    else:
        outer.__context__ = ProviderDown()

    assert judge(outer, retry_on=(ProviderDown,)) is None
    outer.__cause__ = Retryable("down")
    assert judge(outer) is None


# Broken classifiers


class CallableClassifier:
    def __call__(self, exc: BaseException) -> Any:
        raise LookupError(SECRET)


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even printable")

    __repr__ = __str__


async def asynchronous(exc: BaseException) -> Outcome:
    return Outcome.RETRYABLE


BROKEN = [
    pytest.param(raises(ValueError(SECRET)), id="raises"),
    pytest.param(raises(UnprintableError()), id="raises something unprintable"),
    pytest.param(says(True), id="True"),
    pytest.param(says("RETRYABLE"), id="the outcome's name"),
    pytest.param(says((Outcome.RETRYABLE, 5)), id="a tuple"),
    pytest.param(says(UnprintableError()), id="something unprintable"),
    pytest.param(lambda: Outcome.RETRYABLE, id="takes no argument"),
    pytest.param(lambda exc: Verdict(Outcome.RETRYABLE, retry_after=-1), id="illegal verdict"),
    pytest.param(CallableClassifier(), id="an object"),
    pytest.param(
        asynchronous,
        marks=pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),
        id="a coroutine function",
    ),
]


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_classifier(broken, caplog):
    """A broken classifier is skipped, and logged without user data."""
    assert judge(ProviderDown(SECRET), classify=(broken,)) is None

    [record] = caplog.records
    assert record.getMessage().startswith("sqs_backoff.classifier_broken: task ")
    assert record.levelno == logging.ERROR
    assert record.exc_info is None
    assert SECRET not in str(vars(record))
    assert judge(ProviderDown(), classify=(broken, says(NOT_PROCESSED))) == NOT_PROCESSED
    assert judge(ProviderDown(), classify=(broken,), retry_on=(ProviderDown,)) == RETRYABLE


@pytest.mark.parametrize(
    ("broken", "name", "did"),
    [
        (raises(LookupError(SECRET)), "raises.<locals>.classifier", "raised builtins.LookupError"),
        (says("nonsense"), "says.<locals>.<lambda>", "returned builtins.str"),
        (CallableClassifier(), "CallableClassifier", "raised builtins.LookupError"),
    ],
    ids=["function", "lambda", "object"],
)
def test_log_of_broken_classifier(broken, name, did, caplog):
    """The log names the broken classifier and describes its failure."""
    judge(ProviderDown(SECRET), classify=(broken,))

    line = f"{__name__}.{name} {did} for {__name__}.ProviderDown"
    assert line in caplog.records[0].getMessage()


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit()], ids=repr)
def test_stop_in_classifier(stop):
    """A request to stop passes through a classifier."""
    with pytest.raises(type(stop)):
        judge(ProviderDown(), classify=(raises(stop),))


def test_broken_verdict_property(caplog):
    """An exception with a broken verdict counts as a broken classifier."""
    exc = Retryable("later")
    exc.retry_after = -5

    assert judge(exc) is None
    assert judge(exc, classify=(says(Outcome.NOT_PROCESSED),)) == NOT_PROCESSED
    assert "sqs_backoff.classifier_broken: task " in caplog.text


# Retryable and NonRetryable


class WithItsOwnArguments(NonRetryable):
    def __init__(self, code: int, *, field: str) -> None:
        super().__init__(f"{field} refused with {code}", not_processed=True)
        self.code = code


class ThatForgetsItsBase(Retryable):
    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    "exc",
    [
        Retryable("later", retry_after=timedelta(minutes=1)),
        NonRetryable("never", not_processed=True),
        WithItsOwnArguments(401, field="key"),
        ThatForgetsItsBase(),
    ],
    ids=repr,
)
def test_pickling(exc):
    """An exception keeps its attributes when it is pickled.

    It leaves the pool process, and enters a result backend, in pickled form.
    """
    back = pickle.loads(pickle.dumps(exc))
    assert type(back) is type(exc)
    assert (back.args, vars(back), str(back)) == (exc.args, vars(exc), str(exc))
    assert back.verdict == exc.verdict


@pytest.mark.parametrize("value", [0, 1, "no", None])
def test_invalid_not_processed(value):
    """``not_processed`` must be a bool.

    A text such as "no" is true to Python, and would undo work that may have been processed.
    """
    with pytest.raises(TypeError, match=r"^invalid not_processed .*: expected a bool$"):
        NonRetryable("never", not_processed=value)


# Verdict


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (-1, ValueError),
        (timedelta(seconds=-1), ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        (True, TypeError),
        ("30", TypeError),
    ],
    ids=repr,
)
def test_retry_after_must_be_a_time(value, error):
    legal = r"^invalid retry_after .*: expected seconds or a timedelta, from 0 up, finite$"
    with pytest.raises(error, match=legal):
        Verdict(Outcome.RETRYABLE, retry_after=value)
    with pytest.raises(error, match=legal):
        Retryable("later", retry_after=value)


@pytest.mark.parametrize("value", ["RETRYABLE", None, True, Outcome])
def test_invalid_outcome(value):
    """A verdict refuses a value that is no Outcome."""
    with pytest.raises(TypeError, match=r"^invalid outcome .*: expected an Outcome$"):
        Verdict(value)


def test_verdict_is_a_value():
    """A verdict is immutable, hashable and equal by its content."""
    verdict = Verdict(Outcome.RETRYABLE, retry_after=3)

    assert pickle.loads(pickle.dumps(verdict)) == verdict
    assert {verdict: 1}[Verdict(Outcome.RETRYABLE, timedelta(seconds=3))] == 1
    assert isinstance(verdict.retry_after, float)
    assert Verdict(Outcome.RETRYABLE, retry_after=0) != Verdict(Outcome.RETRYABLE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdict.retry_after = 4


@cases(
    "verdict wants_retry nothing_was_processed",
    {
        "retryable": (RETRYABLE, True, True),
        "not processed": (NOT_PROCESSED, False, True),
        "unknown": (UNKNOWN, False, False),
        "in doubt": (Verdict(Outcome.UNKNOWN, safe_to_repeat=True), True, False),
        "no use to repeat": (Verdict(Outcome.NOT_PROCESSED, safe_to_repeat=True), False, True),
    },
)
def test_properties_of_verdict(verdict, wants_retry, nothing_was_processed):
    """A verdict tells apart whether a retry is safe and whether nothing was processed."""
    assert verdict.wants_retry is wants_retry
    assert verdict.nothing_was_processed is nothing_was_processed


def test_safe_to_repeat_must_be_a_bool():
    with pytest.raises(TypeError, match="invalid safe_to_repeat 1: expected a bool"):
        Verdict(Outcome.UNKNOWN, safe_to_repeat=1)
