"""``judge`` decides what a task's failure means, by the task's rules and classifiers."""

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


# The order of the rules


@cases(
    "exc rules expected",
    {
        "no rule": (ProviderDown(), {}, None),
        "not in retry_on": (ProviderDown(), {"retry_on": (OSError, ValueError)}, None),
        "in retry_on": (ProviderDown(), {"retry_on": (OSError, ProviderDown)}, RETRYABLE),
        "subclass is in retry_on": (ProviderDown(), {"retry_on": (ProviderDownForGood,)}, None),
        "base class is in retry_on": (
            ProviderDownForGood(),
            {"retry_on": (ProviderDown,)},
            RETRYABLE,
        ),
        "never_retry comes before retry_on": (
            ProviderDownForGood(),
            {"retry_on": (ProviderDown,), "never_retry": (ProviderDownForGood,)},
            None,
        ),
        "a classifier comes before never_retry": (
            ProviderDown(),
            {"classify": (says(Outcome.RETRYABLE),), "never_retry": (ProviderDown,)},
            RETRYABLE,
        ),
        "a classifier comes before retry_on": (
            ProviderDown(),
            {"classify": (says(Outcome.NOT_PROCESSED),), "retry_on": (ProviderDown,)},
            NOT_PROCESSED,
        ),
        "a classifier's UNKNOWN is an answer": (
            ProviderDown(),
            {"classify": (says(Outcome.UNKNOWN),), "retry_on": (ProviderDown,)},
            UNKNOWN,
        ),
        "the first classifier with an answer decides": (
            ProviderDown(),
            {"classify": (says(None), says(NOT_PROCESSED), says(RETRYABLE))},
            NOT_PROCESSED,
        ),
        "no classifier has an answer": (
            ProviderDown(),
            {"classify": (says(None),), "retry_on": (ProviderDown,)},
            RETRYABLE,
        ),
        "a classifier's verdict with a time to wait": (
            ProviderDown(),
            {"classify": (says(Verdict(Outcome.RETRYABLE, retry_after=30)),)},
            Verdict(Outcome.RETRYABLE, retry_after=30),
        ),
        "Retryable comes before all rules": (
            Retryable("later", retry_after=5),
            {"classify": (says(Outcome.UNKNOWN),), "never_retry": (Retryable,)},
            Verdict(Outcome.RETRYABLE, retry_after=5),
        ),
        "NonRetryable comes before all rules": (
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
    """An error is not retryable just because it was raised from, or after, a retryable one.

    The work may have been done before the second error.
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
    """A classifier that raises or returns nonsense is skipped, and logged without user data."""
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
    """If a classifier raises ``KeyboardInterrupt`` or ``SystemExit``, ``judge`` raises it too."""
    with pytest.raises(type(stop)):
        judge(ProviderDown(), classify=(raises(stop),))


def test_broken_verdict_property(caplog):
    """If the ``verdict`` of an exception raises, it is logged and the classifiers decide."""
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
    """``Retryable``, ``NonRetryable`` and their subclasses keep their attributes when pickled.

    The pool process pickles an exception for the main process, and so may a result backend.
    """
    back = pickle.loads(pickle.dumps(exc))
    assert type(back) is type(exc)
    assert (back.args, vars(back), str(back)) == (exc.args, vars(exc), str(exc))
    assert back.verdict == exc.verdict


@pytest.mark.parametrize("value", [0, 1, "no", None])
def test_invalid_not_processed(value):
    """``not_processed`` must be a bool.

    A text such as "no" counts as true in Python. It would undo work that may have been done.
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
def test_invalid_retry_after(value, error):
    """A ``retry_after`` that is not a finite time, from 0 up, is refused."""
    legal = r"^invalid retry_after .*: expected seconds or a timedelta, from 0 up, finite$"
    with pytest.raises(error, match=legal):
        Verdict(Outcome.RETRYABLE, retry_after=value)
    with pytest.raises(error, match=legal):
        Retryable("later", retry_after=value)


@pytest.mark.parametrize("value", ["RETRYABLE", None, True, Outcome])
def test_invalid_outcome(value):
    """A verdict refuses an outcome that is no ``Outcome``."""
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
    """A verdict answers two questions: whether to retry, and whether surely nothing was done."""
    assert verdict.wants_retry is wants_retry
    assert verdict.nothing_was_processed is nothing_was_processed


def test_invalid_safe_to_repeat():
    """A verdict refuses a ``safe_to_repeat`` that is no bool."""
    with pytest.raises(TypeError, match="invalid safe_to_repeat 1: expected a bool"):
        Verdict(Outcome.UNKNOWN, safe_to_repeat=1)
