"""A run from tracer to settlement: the task's word stands, whatever fails after it."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import logging
import pickle
import sys
import time
import types
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import billiard.einfo
import pytest
from celery import Celery
from celery.app.trace import build_tracer
from celery.backends.cache import _DUMMY_CLIENT_CACHE
from celery.canvas import Signature
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.worker.request import create_request_cls
from kombu.exceptions import EncodeError, OperationalError

from celery_sqs_backoff import (
    NonRetryable,
    Outcome,
    Retryable,
    Schedule,
    SQSBackoffTask,
    Verdict,
)
from celery_sqs_backoff.retry.budget import GiveUpReason
from celery_sqs_backoff.retry.decision import End
from celery_sqs_backoff.safe.errors import Refused, StoreUnavailable
from celery_sqs_backoff.safe.guard import Run as SafeRun
from celery_sqs_backoff.safe.identity import run_id_of
from celery_sqs_backoff.safe.scope import scope_key
from celery_sqs_backoff.safe.settings import vault_of
from celery_sqs_backoff.safe.shared import is_in_doubt
from celery_sqs_backoff.safe.stores.memory import MemoryStore
from celery_sqs_backoff.safe.workflow import Workflow
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.task.handover import DELIVERY_KEY, RUNNING, delivery_of, report_of
from celery_sqs_backoff.worker.lease import State
from celery_sqs_backoff.worker.payload import task_payload
from celery_sqs_backoff.worker.request import BackoffRequest

from .test_request import URL
from .test_request import Run as Received

# Celery warns of each failure outside of a task's body: of those that are made here, too.
pytestmark = pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")


class Down(Exception):
    """A result backend, or a hook, that does not work."""


@pytest.fixture(autouse=True)
def _no_results_of_other_tests():
    _DUMMY_CLIENT_CACHE.clear()


class Pool:
    """What Celery asks of a pool when it generates a request class."""

    apply_async = None


class Case(Received):
    """One message: run by Celery's own tracer, reported to Celery's own generated request."""

    def __init__(self, run, *, base=SQSBackoffTask, embed=None, **options):
        self._run, self._base, self._embed = run, base, embed or {}
        super().__init__(**options)

    def ends(self):
        """Run the task and report its end, through a pickle as the prefork pool does."""
        task = self.request.task
        task.__trace__ = build_tracer(task.name, task, app=self.app)
        generated = create_request_cls(BackoffRequest, task, Pool, "here", None, app=self.app)
        self.request.__class__ = generated
        request = pickle.loads(pickle.dumps(self.request.request_dict)) | self._embed
        retval, info, runtime, text = task.__trace__("task-id", [], {}, request)
        self.result_of_pool = (1, retval, runtime) if info else (0, text, runtime)
        self.request.on_success(pickle.loads(pickle.dumps(self.result_of_pool)))
        return self.ended

    @property
    def report(self):
        return report_of(self.result_of_pool[1])


@pytest.fixture
def case(monkeypatch):
    """Make a case of a function that is the task's body, bound."""

    def make(body, *, base=SQSBackoffTask, embed=None, **options):
        made = Case(body, base=base, embed=embed, **options)
        task = made.request.task

        class Replaced(base):
            name = "mail"
            abstract = False

        for name, value in options.items():
            if name not in {"queue", "facts", "headers", "keeper"}:
                setattr(Replaced, name, value)
        Replaced.backoff = options.get("backoff", Schedule([7]))
        Replaced.run = body
        made.app.tasks.unregister("mail")
        replaced = made.app.register_task(Replaced())
        assert task is not replaced
        made.request._task = replaced
        made.request._settler._options = replaced.backoff_options
        return made

    return make


def raises(exc):
    def run(self):
        raise exc

    return run


def returns(self):
    return "done"


def break_backend(case, *methods):
    def down(*args, **kwargs):
        raise Down("the result backend is down")

    for method in methods:
        code = down.__code__.replace(co_name=method)
        setattr(case.app.backend, method, types.FunctionType(code, globals()))


def test_a_success_is_done(case):
    assert case(returns).ends() is State.DONE


def test_a_retry_hides_the_message(case):
    run = case(raises(Retryable("down")))
    assert run.ends() is State.DEFERRED
    assert run.delay == 7


@pytest.mark.parametrize(
    "methods",
    [["mark_as_retry"], ["mark_as_retry", "mark_as_failure"]],
    ids=["for a moment", "for long"],
)
def test_a_result_backend_that_is_down_does_not_lose_a_retry(case, methods, caplog):
    run = case(raises(Retryable("down")))
    break_backend(run, *methods)
    assert run.ends() is State.DEFERRED
    assert run.delay == 7


def test_a_users_on_retry_that_raises_does_not_lose_the_retry(case, caplog):
    class BadHook(SQSBackoffTask):
        abstract = True

        def on_retry(self, *args, **kwargs):
            raise Down("in the user's hook")

    run = case(raises(Retryable("down")), base=BadHook)
    assert run.ends() is State.DEFERRED
    assert run.result == "RETRY"
    assert "sqs_backoff.after_run_failed: task mail[task-id]" in caplog.text
    assert "in the user's hook" not in caplog.text


def test_a_success_whose_result_cannot_be_stored_is_done(case, caplog):
    run = case(returns)
    break_backend(run, "mark_as_done", "mark_as_failure")
    assert run.ends() is State.DONE
    assert "sqs_backoff.after_run_failed" in caplog.text


@pytest.fixture
def told():
    """What has been told of a failure: the task's hook, its errbacks, the chord that waits."""
    return []


@pytest.fixture
def compensating_case(case, told):
    """A case of a task whose failures undo something."""

    class Compensating(SQSBackoffTask):
        abstract = True

        def on_failure(self, *args):
            told.append("on_failure")

    def make(body, **embed):
        run = case(body, base=Compensating, embed={"errbacks": [{"task": "refund"}], **embed})
        run.app.backend._call_task_errbacks = lambda *args: told.append("link_error")
        run.app.backend.on_chord_part_return = lambda *args: told.append("chord")
        return run

    return make


def fail_store_result(case, *, fails):
    """Let the backend raise where ``fails`` says so, given a state, and how often it was stored."""
    backend, seen = case.app.backend, []
    store = backend.store_result

    def store_result(task_id, result, state, **kwargs):
        seen.append(state)
        if fails(state, seen.count(state)):
            raise Down("not now, or never")
        return store(task_id, result, state, **kwargs)

    backend.store_result = store_result
    return seen


@pytest.mark.parametrize(
    ("body", "result"),
    [(returns, "SUCCESS"), (raises(Retryable("down")), "PENDING")],
    ids=["success", "retry"],
)
def test_a_result_that_cannot_be_stored_for_a_moment_is_no_failure(
    compensating_case, told, body, result, caplog
):
    """The backend is back when Celery would store FAILURE, and call what undoes the work."""
    run = compensating_case(body)
    fail_store_result(run, fails=lambda state, nth: state in {"SUCCESS", "RETRY"} and nth == 1)
    run.ends()
    assert told == []
    assert run.result == result
    assert "sqs_backoff.after_run_failed: task mail[task-id]" in caplog.text


def test_who_waits_for_a_result_that_the_backend_refuses_is_told_so(compensating_case, told):
    """More than 64 KB on MySQL, for example: nobody should wait for it for ever."""
    run = compensating_case(returns)
    fail_store_result(run, fails=lambda state, nth: state == "SUCCESS")
    assert run.ends() is State.DONE
    assert run.result == "FAILURE"
    assert told == []


def test_a_time_limit_while_a_result_is_stored_again_makes_no_failure(compensating_case, told):
    run = compensating_case(returns)
    stored = []

    def store_result(task_id, result, state, **_):
        stored.append(state)
        if state == "SUCCESS":
            raise SoftTimeLimitExceeded if len(stored) > 1 else OSError("a blip")

    run.app.backend.store_result = store_result
    assert run.ends() is State.DONE
    assert stored == ["SUCCESS", "STARTED", "SUCCESS"]
    assert told == []


def test_a_backend_that_is_away_is_asked_for_one_thing_more(compensating_case, told):
    run = compensating_case(returns)
    seen = fail_store_result(run, fails=lambda state, nth: True)
    assert run.ends() is State.DONE
    assert seen == ["SUCCESS", "STARTED"]
    assert told == []


def test_a_part_whose_retry_cannot_be_stored_does_not_fail_its_chord(compensating_case, told):
    run = compensating_case(raises(Retryable("down")), chord={"task": "sum"})
    fail_store_result(run, fails=lambda state, nth: state == "RETRY")
    assert run.ends() is State.DEFERRED
    assert told == []


def test_a_result_that_is_not_json_does_not_make_a_dead_letter(case):
    run = case(lambda self: object())
    run.app.conf.result_serializer = "json"
    assert run.ends() is State.DONE


def test_a_success_whose_chord_was_not_told_is_a_dead_letter(case):
    run = case(returns, embed={"chord": {"task": "sum"}})
    break_backend(run, "mark_as_done", "mark_as_failure")
    assert run.ends() is State.DEAD_LETTERED
    assert run.lease.record.reason == "the rest of its workflow could not be sent"


@pytest.mark.parametrize(
    "embed",
    [
        {"chord": {"task": "sum"}},
        {"chain": [{"task": "b", "chord": {"task": "sum"}, "options": {"task_id": "2"}}]},
    ],
    ids=["itself", "by the end of its chain"],
)
def test_a_refused_message_whose_chord_was_not_told_is_a_dead_letter(case, embed):
    run = case(raises(Refused({"refused": "another message has passed"})), embed=embed)
    break_backend(run, "mark_as_done")
    assert run.ends() is State.DEAD_LETTERED
    assert run.lease.record.reason == "the rest of its workflow could not be sent"
    assert run.lease.record.exception_type.endswith("Down")


def test_a_refused_message_that_no_chord_waits_for_is_done(case):
    run = case(raises(Refused({"refused": "another message has passed"})))
    break_backend(run, "mark_as_done")
    assert run.ends() is State.DONE


_NEXT = {"task": "next", "args": [], "kwargs": {}, "options": {"task_id": "2"}, "immutable": False}


@pytest.mark.parametrize(
    "embed",
    [
        {"chain": [_NEXT]},
        {"chain": [_NEXT, _NEXT]},
        {"callbacks": [_NEXT]},
        {"callbacks": [_NEXT, _NEXT]},
    ],
    ids=["the last of a chain", "a chain", "a callback", "callbacks"],
)
def test_a_success_that_could_not_be_handed_on_is_a_dead_letter(case, monkeypatch, embed):
    run = case(returns, embed=copy.deepcopy(embed))

    def send_task_message(*args, **kwargs):
        raise OperationalError("SQS is away")

    monkeypatch.setattr(run.app.amqp, "send_task_message", send_task_message)
    assert run.ends() is State.DEAD_LETTERED
    assert run.lease.record.reason == GiveUpReason.NOT_HANDED_ON.value
    assert run.lease.record.exception_type == "kombu.exceptions.OperationalError"


def test_a_failure_whose_result_cannot_be_stored_keeps_its_reason(case):
    run = case(raises(ValueError("bad")))
    break_backend(run, "mark_as_failure")
    assert run.ends() is State.DEAD_LETTERED
    assert run.lease.record.reason == "not retryable"
    assert run.lease.record.exception_type == "builtins.ValueError"


@pytest.mark.parametrize(
    ("exc", "settled"),
    [
        (Ignore(), State.DONE),
        (Reject("no", requeue=False), State.DEAD_LETTERED),
        (Reject("later", requeue=True), State.DEFERRED),
    ],
    ids=repr,
)
def test_the_tasks_own_words(case, exc, settled):
    assert case(raises(exc)).ends() is settled


class Timeout(BaseException):
    """As gevent.Timeout: no ``Exception``."""


@pytest.mark.parametrize(
    "exc",
    [asyncio.CancelledError(), GeneratorExit(), Timeout(), MemoryError("x"), KeyboardInterrupt()],
    ids=lambda exc: type(exc).__name__,
)
class TestARunThatIsAborted:
    def test_is_settled_as_a_crash_and_its_place_is_free(self, case, exc):
        run = case(raises(exc), crash_budget=2)
        assert run.ends() is State.DEFERRED
        assert run.delay == 7
        assert run.result == "RETRY"
        assert run.report.ended.end is End.ABORTED

    def test_is_given_up_by_the_crash_budget_and_fails_then(self, case, exc):
        run = case(raises(exc), crash_budget=1)
        assert run.ends() is State.DEAD_LETTERED
        assert run.lease.record.reason == "the run was aborted"
        assert run.lease.record.exception_type.endswith(type(exc).__name__)
        assert run.result == "FAILURE"

    def test_is_the_tasks_own_matter_if_it_has_a_rule(self, case, exc):
        run = case(raises(exc), classify=lambda failure: Verdict(Outcome.NOT_PROCESSED))
        assert run.ends() is State.DEAD_LETTERED
        assert run.lease.record.outcome == "NOT_PROCESSED"
        assert run.result == "FAILURE"


class GeventTimeout(BaseException):
    def __init__(self, seconds):
        self.seconds = seconds


@pytest.fixture
def gevent(monkeypatch):
    monkeypatch.setitem(sys.modules, "gevent", types.SimpleNamespace(Timeout=GeventTimeout))


@pytest.mark.usefixtures("gevent")
@pytest.mark.parametrize(
    ("body", "method", "settled"),
    [
        (returns, "mark_as_done", State.DONE),
        (raises(Retryable("down")), "mark_as_retry", State.DEFERRED),
        (raises(NonRetryable("no")), "mark_as_failure", State.DEAD_LETTERED),
    ],
)
def test_gevents_time_limit_does_not_overrule_a_run_that_has_ended(case, body, method, settled):
    """A result backend that hangs would have what is done repeated until the crash budget ends."""
    run = case(body, time_limit=5, crash_budget=5)

    def hang(*args, **kwargs):
        raise GeventTimeout(5)

    setattr(run.app.backend, method, hang)
    assert run.ends() is settled
    assert run.report is None or run.report.ended.end is not End.TIME_LIMIT


@pytest.mark.usefixtures("gevent")
def test_gevents_time_limit_reaches_its_pool(case):
    run = case(raises(GeventTimeout(5)), time_limit=5)
    with pytest.raises(GeventTimeout):
        run.ends()
    own = case(raises(GeventTimeout(3)), time_limit=5)
    assert own.ends() is State.DEFERRED


def test_what_goes_through_the_pipe_is_small(case):
    class Provider(Exception):
        def __init__(self):
            super().__init__("y" * 50_000)
            self.response = "x" * 1_000_000

    run = case(raises(Provider()))
    run.ends()
    assert len(pickle.dumps(run.result_of_pool)) < 16_000


def test_the_frames_that_celery_copies_are_freed_at_once(case):
    """Some 150 KB each; not when Python comes to collect its oldest garbage, failures later."""
    failing = case(raises(ValueError("bad")))
    logging.disable(logging.CRITICAL)  # pytest keeps the records, and they the copies
    gc.collect()
    gc.disable()
    try:
        before = copied_frames()
        failing.ends()
        assert not copied_frames() - before
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


def test_a_client_that_works_in_a_coroutine_of_its_own_survives_a_failure(case):
    """It hands errors to its callers and goes on; its frame is part of their traceback."""

    def client():
        answer = None
        while True:
            request = yield answer
            try:
                raise Retryable(request)
            except Retryable as exc:
                answer = exc

    calls = client()
    next(calls)

    def run(self):
        raise calls.send("down")

    assert case(run).ends() is State.DEFERRED
    assert isinstance(calls.send("down again"), Retryable)


def copied_frames():
    """The ids of those of this thread's making; those of other tests may end at any time."""
    return {id(thing) for thing in gc.get_objects() if type(thing) is billiard.einfo.Traceback}


def test_the_run_of_a_receive_has_its_id(case):
    """By which the main process says which run it has lost."""
    seen = []

    def look(self, *_):
        seen.append((run_id_of(self.request), delivery_of(self.request)))

    class Looks(SQSBackoffTask):
        abstract = True
        before_start = look

    case(look, base=Looks).ends()
    [(run_id, delivery), then] = seen
    assert run_id == delivery.run_id
    assert then == seen[0]
    others = [{"message_id": "other"}, {"receive_count": 9}, {"received_at": 9.5}]
    assert run_id not in [replace(delivery, **other).run_id for other in others]


def test_the_request_of_a_task_is_as_celerys_own(case):
    seen = {}

    def look(self):
        seen.update(vars(self.request))
        seen["delivery"] = delivery_of(self.request)

    case(look).ends()
    assert DELIVERY_KEY not in seen
    assert seen["headers"] is None
    assert not [v for v in vars_of(seen["properties"]) if isinstance(v, Delivery)]
    assert isinstance(seen["delivery"], Delivery)
    assert json.loads(json.dumps(seen["properties"])) == seen["properties"]


def vars_of(value):
    yield value
    if isinstance(value, dict):
        for inner in value.values():
            yield from vars_of(inner)


def test_a_task_called_as_a_function_does_not_speak_for_the_run(case):
    """Celery itself calls errbacks of the old signature so, after the run."""

    def run(self):
        self.app.tasks["other"]()
        raise ValueError("bad")

    class Errback(SQSBackoffTask):
        name = "other"

        def run(self):
            return "fine"

    class Calls(SQSBackoffTask):
        abstract = True

        def on_failure(self, *args, **kwargs):
            self.app.tasks["other"]()

    made = case(run, base=Calls)
    made.app.register_task(Errback())
    assert made.ends() is State.DEAD_LETTERED
    assert made.lease.record.outcome == "UNKNOWN"


def test_a_forged_delivery_is_none(case):
    run = case(returns)
    task = run.request.task
    task.__trace__ = build_tracer(task.name, task, app=run.app)
    request = {"id": "task-id", DELIVERY_KEY: {"message_id": "m", "queue_url": URL}}
    assert task.__trace__("task-id", [], {}, request).info is None


def test_the_tracer_of_a_task_can_be_deleted_as_in_celery():
    """Celery's own tests put one there and take it away again."""
    app = Celery("trace", broker="memory://", set_as_current=False)

    @app.task(base=SQSBackoffTask, shared=False, lazy=False)
    def task():
        """Do nothing."""

    task.__trace__ = build_tracer(task.name, task, app=app)
    del task.__trace__
    assert task.__trace__ is None


def test_a_result_backend_that_is_away_keeps_no_task_from_running(case, caplog):
    """With task_track_started Celery writes there first, and fails the task if it cannot."""
    ran = []
    run = case(lambda self: ran.append(1), track_started=True)
    break_backend(run, "store_result")
    assert run.ends() is State.DONE
    assert ran == [1]
    assert "start_not_stored" in caplog.text


def test_a_soft_time_limit_is_not_lost_on_a_result_backend_that_hangs(case, monkeypatch):
    """It comes once: without it the task would run for as long as it likes."""
    ran = []

    def hang(task_id, result, state, **kwargs):
        if state == "STARTED":
            raise SoftTimeLimitExceeded(1)

    run = case(lambda self: ran.append(1), track_started=True)
    monkeypatch.setattr(run.request.task.backend, "store_result", hang)
    run.app.conf.sqs_backoff = {"store": MemoryStore()}
    assert run.ends() is State.DEFERRED
    assert (run.delay, ran) == (7, [])
    assert not is_in_doubt(run.app, run.request.task.name, "task-id"), "it has done nothing"


@pytest.mark.parametrize("how", ["soft time limit while it is judged", "Reject"])
def test_what_a_failed_run_owes_is_not_lost(case, monkeypatch, how):
    """A client whose timeout is the soft time limit: both come at once."""
    undone = []

    def body(self):
        with self.workflow("order:7") as order:
            order.step("release", str, 7, undo=take_back.s())
            raise Reject("no", requeue=False) if how == "Reject" else TimeoutError

    def judge(task, exc):
        raise SoftTimeLimitExceeded(1)

    run = case(body)

    @run.app.task(shared=False)
    def take_back(done):
        undone.append(done)

    run.app.conf.update(sqs_backoff={"store": MemoryStore()}, task_always_eager=True)
    monkeypatch.setattr("celery_sqs_backoff.task.failed_run.judge_failure", judge)
    assert run.ends() is State.DEAD_LETTERED
    assert undone == ["7"]


def test_a_task_that_rejects_its_message_is_not_repeated_while_the_store_is_away(case):
    class Away(MemoryStore):
        def get(self, key):
            raise StoreUnavailable

    run = case(raises(Reject("no", requeue=False)))
    run.app.conf.sqs_backoff = {"store": Away()}
    assert run.ends() is State.DEAD_LETTERED


def test_a_rejected_message_comes_back_for_undoing_tasks_that_could_not_be_sent(case):
    def body(self):
        with self.workflow("order:7") as order:
            order.step("release", str, 7, undo=take_back.s())
            raise Reject("no", requeue=False)

    run = case(body)

    @run.app.task(shared=False)
    def take_back(done): ...

    def away(*args, **kwargs):
        raise OSError

    take_back.apply_async = away
    run.app.conf.sqs_backoff = {"store": MemoryStore()}
    assert run.ends() is State.DEFERRED
    assert run.delay == 30


@pytest.mark.parametrize("names_it", [True, False])
def test_a_message_that_is_requeued_after_a_lost_answer_is_in_doubt(case, names_it):
    """A later run that finds the provider down must not undo what this one may have done."""

    def body(self):
        try:
            raise TimeoutError("the answer was lost")
        except TimeoutError as exc:
            raise Reject(exc if names_it else "later", requeue=True) from exc

    run = case(body)
    run.app.conf.sqs_backoff = {"store": MemoryStore()}
    assert run.ends() is State.DEFERRED
    assert is_in_doubt(run.app, run.request.task.name, "task-id")


@pytest.mark.parametrize("cause", [TimeoutError("the answer was lost"), Retryable("down")])
def test_a_message_that_is_rejected_after_a_lost_answer_is_in_doubt_when_redriven(case, cause):
    """As one that is given up: a provider that is down then must not undo what may be done."""
    run = case(raises(Reject(cause)), undo=lambda *args: None)
    run.app.conf.sqs_backoff = {"store": MemoryStore()}
    assert run.ends() is State.DEAD_LETTERED
    assert is_in_doubt(run.app, "mail", "task-id") is isinstance(cause, TimeoutError)


@pytest.mark.parametrize("throw", [True, False])
@pytest.mark.parametrize("cause", [TimeoutError("the answer was lost"), Retryable("down")])
def test_a_copy_that_the_broker_refuses_puts_no_message_in_doubt(case, cause, throw, monkeypatch):
    """What the retry was for does. Redriven, a message that was undone was not undone again."""

    def body(self):
        try:
            raise cause
        except type(cause) as exc:
            raise self.retry(args=(7,), exc=exc, throw=throw) from exc

    def refuse(*args, **options):
        raise EncodeError("not JSON")

    monkeypatch.setattr(Signature, "apply_async", refuse)
    run = case(body, undo=lambda *args: None)
    run.app.conf.sqs_backoff = {"store": MemoryStore()}
    assert run.ends() is State.DEAD_LETTERED
    assert is_in_doubt(run.app, "mail", "task-id") is isinstance(cause, TimeoutError)


def test_a_message_that_is_requeued_for_the_last_time_may_have_been_done(case):
    """Its dead letter said RETRYABLE, so a redrive did not ask before it charged again."""
    run = case(raises(Reject(TimeoutError("the answer was lost"), requeue=True)), max_retries=0)
    assert run.ends() is State.DEAD_LETTERED
    assert run.lease.record.outcome == "UNKNOWN"


@pytest.mark.parametrize("cause", [None, Retryable("down"), StoreUnavailable()])
def test_a_message_that_is_requeued_unprocessed_is_not_in_doubt(case, cause):
    run = case(raises(Reject(cause or "not its turn yet", requeue=True)))
    run.app.conf.sqs_backoff = {"store": MemoryStore()}
    assert run.ends() is State.DEFERRED
    assert not is_in_doubt(run.app, run.request.task.name, "task-id")


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_message_whose_next_run_is_in_its_workflow_is_left_to_that_one(case, has_ended):
    """It was given up, and the next run's retry with it: nobody went on, or took anything back.

    Or the next run had succeeded: then ``link_error`` was called, for work that was done.
    """

    def body(self):
        with self.workflow("order:7", lease=0.1) as order:
            order.step("pay", str, 7)
            time.sleep(0.2)  # suspended: SQS has delivered the message again
            vault = vault_of(self.app)
            next_run = SafeRun.of(vault, self.name, self.request.id, "next")
            entered = {"scope": "scope:order:7", "lease": 60, "namespace": ""}
            there = Workflow(vault, app=self.app, run=next_run, **entered).__enter__()
            if has_ended:
                there.__exit__(None, None, None)
            order.step("release", str, 7)

    run = case(body)
    run.app.conf.sqs_backoff = {"store": MemoryStore()}
    assert run.ends() is State.DEFERRED


def test_a_run_that_enters_its_workflow_again_is_not_taken_for_the_next_one(case):
    """A method of the task enters it too; then its message came back for ever."""

    def body(self):
        order = self.workflow("order:7")
        with self.workflow("order:7") as prepared:
            prepared.step("pay", str, 7)
        with order:
            order.step("release", str, 7)
            raise NonRetryable("no such account")

    run = case(body)
    run.app.conf.sqs_backoff = {"store": MemoryStore()}
    assert run.ends() is State.DEAD_LETTERED


@pytest.mark.parametrize(
    ("has_ended", "end"), [(True, State.DEAD_LETTERED), (False, State.DEFERRED)]
)
def test_what_fails_after_a_workflow_is_not_repeated_for_a_second_delivery(case, has_ended, end):
    """That one has entered the workflow since: a mail whose answer was lost was sent again.

    Unless it is in a further step there, and may have to come back.
    """

    def body(self):
        with self.workflow("order:7") as order:
            order.step("release", str, 7)
        vault = vault_of(self.app)
        second = SafeRun.of(vault, self.name, self.request.id, "second")
        there = Workflow(vault, "scope:order:7", self.app, second, lease=60, namespace="")
        there.__enter__().step("post", str, 7)
        if has_ended:
            there.__exit__(None, None, None)
        raise TimeoutError("the mail's answer was lost")

    run = case(body)
    run.app.conf.sqs_backoff = {"store": MemoryStore()}
    assert run.ends() is end


def test_a_freed_workflow_in_which_nothing_was_done_calls_for_nobody(case, caplog):
    def body(self):
        with self.workflow("order:7"):
            vault_of(self.app).discard(scope_key("scope:order:7"))
            raise NonRetryable("no such account")

    run = case(body)
    run.app.conf.sqs_backoff = {"store": MemoryStore()}
    assert run.ends() is State.DEAD_LETTERED
    assert "undo_by_hand" not in caplog.text


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, "STARTED"),
        ({"embed": {"ignore_result": True}}, "PENDING"),
        ({"track_started": False}, "PENDING"),
    ],
)
def test_a_task_that_tracks_its_start_is_shown_as_started_while_it_runs(case, options, seen):
    states = []

    def run(self):
        states.append(self.AsyncResult(self.request.id).state)

    assert case(run, **{"track_started": True} | options).ends() is State.DONE
    assert states == [seen]


@pytest.mark.parametrize("header", [{}, {"ignore_result": None}], ids=["without", "foreign"])
def test_a_message_may_leave_it_to_the_task_whether_its_result_is_stored(case, header):
    """One from another language, or an old Celery; and one that an adapter has made a task of."""
    payload = task_payload("mail", [], {}, task_id="task-id", queue="q", origin="here")
    assert payload["headers"]["ignore_result"] is None
    states = []

    def run(self):
        states.append(self.AsyncResult(self.request.id).state)

    received = case(run, track_started=True, ignore_result=True, embed=header)
    del received.request._request_dict["ignore_result"]
    assert received.ends() is State.DONE
    assert (states, received.result) == (["PENDING"], "PENDING")


@pytest.mark.parametrize(
    ("options", "seen"), [({}, "STARTED"), ({"track_started": False}, "PENDING")]
)
def test_a_task_derived_from_one_that_tracks_its_start_may_do_otherwise(case, options, seen):
    parent = type(case(returns, track_started=True).request.task)
    states = []

    def run(self):
        states.append(self.AsyncResult(self.request.id).state)

    assert case(run, base=parent, **options).ends() is State.DONE
    assert states == [seen]


def test_a_task_that_succeeded_is_not_started_again_where_celery_deduplicates(case, monkeypatch):
    """Not every result backend keeps SUCCESS: Django's stores what it is given."""
    ran, stored = [], []
    run = case(lambda self: ran.append(1), track_started=True, facts={"receive_count": 2})
    run.app.conf.worker_deduplicate_successful_tasks = True
    monkeypatch.setattr("celery.app.trace.successful_requests", set())
    backend = run.request.task.backend
    backend.store_result("task-id", None, "SUCCESS")
    monkeypatch.setattr(backend, "store_result", lambda *args, **kwargs: stored.append(args))
    assert run.ends() is State.DONE
    assert (ran, stored) == ([], [])


def test_a_task_runs_although_celery_cannot_ask_whether_it_has_succeeded_before(case, monkeypatch):
    """What was received again became a dead letter, never run, while Redis was away."""
    ran = []
    run = case(lambda self: ran.append(1), ignore_result=True, facts={"receive_count": 2})
    run.app.conf.worker_deduplicate_successful_tasks = True
    monkeypatch.setattr("celery.app.trace.successful_requests", set())
    break_backend(run, "_get_task_meta_for")
    assert run.ends() is State.DONE
    assert ran == [1]


def test_a_task_that_asks_for_a_result_itself_is_told_that_the_backend_is_away(case):
    def asks(self):
        return self.AsyncResult(self.request.id).state

    run = case(asks)
    break_backend(run, "_get_task_meta_for")
    assert run.ends() is State.DEAD_LETTERED
    assert run.report.error.exception_type.endswith(".Down")


@pytest.mark.parametrize(
    ("exc", "state"),
    [(Retryable("down"), State.DEFERRED), (ValueError("bad"), State.DEAD_LETTERED)],
)
def test_what_before_start_raises_means_what_it_would_mean_in_the_task(case, exc, state):
    class Prepared(SQSBackoffTask):
        abstract = True

        def before_start(self, task_id, args, kwargs):
            raise exc

    run = case(returns, base=Prepared)
    assert run.ends() is state
    assert run.report.ended.word is not None


def test_a_task_that_before_start_calls_as_a_function_is_not_the_run(case):
    has_begun = []
    app = Celery("other", set_as_current=False)

    @app.task(base=SQSBackoffTask, shared=False)
    def other():
        """Do nothing."""

    class Prepared(SQSBackoffTask):
        abstract = True

        def before_start(self, task_id, args, kwargs):
            other()
            has_begun.append(RUNNING.get().has_begun)

    def body(self):
        has_begun.append(RUNNING.get().has_begun)

    assert case(body, base=Prepared).ends() is State.DONE
    assert has_begun == [False, True]


def test_a_task_that_celery_could_not_begin_comes_back(case, monkeypatch):
    """What it has stored of that stands; here the result backend is away, too."""
    ran = []
    run = case(lambda self: ran.append(1))

    def fail(*args):
        raise Down("no connection yet")

    monkeypatch.setattr(run.app.loader, "on_task_init", fail)
    break_backend(run, "store_result")
    assert run.ends() is State.DEFERRED
    assert (run.delay, ran) == (7, [])


class InTransaction(SQSBackoffTask):
    """A base class as Django projects have them: ``run`` in a transaction; commits may fail."""

    abstract = True
    begins = commits = staticmethod(lambda: None)

    def __call__(self, *args, **kwargs):
        self.begins()
        result = super().__call__(*args, **kwargs)
        self.commits()
        return result


def fails_by(exc):
    def fail():
        raise exc

    return staticmethod(fail)


@pytest.mark.parametrize("where", ["begins", "commits"])
@pytest.mark.parametrize(
    ("retry_on", "state"), [((), State.DEAD_LETTERED), ((Down,), State.DEFERRED)]
)
def test_what_a_task_raises_around_its_run_is_judged_as_what_its_run_raises(
    case, where, retry_on, state
):
    options = {where: fails_by(Down("the database is away")), "retry_on": retry_on}
    run = case(lambda self: "done", base=InTransaction, **options)
    run.ends()
    assert run.lease.state is state


def test_a_task_with_a_call_of_its_own_runs_once_and_is_done(case):
    runs = []
    run = case(lambda self: runs.append(self.request.id), base=InTransaction)
    run.ends()
    assert run.lease.state is State.DONE
    assert runs == ["task-id"]


def test_a_call_of_its_own_sees_what_the_run_raises_and_may_say_it_in_other_words(case):
    class Translates(SQSBackoffTask):
        abstract = True

        def __call__(self, *args, **kwargs):
            try:
                return super().__call__(*args, **kwargs)
            except Down as exc:
                raise Retryable("later") from exc

    run = case(raises(Down("x")), base=Translates)
    run.ends()
    assert run.lease.state is State.DEFERRED


def test_retry_in_a_task_with_a_call_of_its_own_keeps_the_message(case):
    run = case(lambda self: self.retry(countdown=7), base=InTransaction)
    run.ends()
    assert run.lease.state is State.DEFERRED


def test_a_task_with_a_call_of_its_own_called_as_a_function_raises_what_it_raises(case):
    run = case(raises(Down("x")), base=InTransaction, retry_on=(Down,))
    with pytest.raises(Down):
        run.request.task()
    with pytest.raises(Down):
        run.request.task.run()


class Again(SQSBackoffTask):
    abstract = True

    def __call__(self, *args, **kwargs):
        try:
            return self.run(*args, **kwargs)
        except Down:
            return self.run(*args, **kwargs)


class AgainByCelery(SQSBackoffTask):
    abstract = True

    def __call__(self, *args, **kwargs):
        try:
            return super().__call__(*args, **kwargs)
        except Down:
            return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("base", [Again, AgainByCelery])
def test_a_call_of_its_own_that_runs_twice_runs_for_its_message_twice(case, base):
    """After a database connection that was closed, for example."""
    ids = []

    def body(self):
        ids.append(self.request.id)
        if len(ids) == 1:
            raise Down("the connection was closed")
        self.retry(countdown=5)

    run = case(body, base=base)
    assert run.ends() is State.DEFERRED
    assert run.delay == 5
    assert ids == ["task-id", "task-id"]


@pytest.mark.parametrize("exc", [None, Down("x")], ids=["without exc", "with exc"])
def test_a_retry_asked_for_by_a_task_called_as_a_function_is_that_of_the_message(case, exc):
    """Celery publishes no copy for it. The message was deleted, as if there were one."""

    def body(self):
        @self.app.task(base=SQSBackoffTask, bind=True, name="inner", shared=False)
        def inner(self):
            try:
                raise Down("x")
            except Down:
                self.retry(exc=exc, countdown=3)

        inner()

    run = case(body, retry_on=(Down,))
    assert run.ends() is State.DEFERRED
    assert run.delay == 7
    assert run.report.error.exception_type.endswith("Down")


@pytest.mark.parametrize(
    ("when", "delay"),
    [(None, 7), (30, 30), (timedelta(seconds=90), 90)],
    ids=["no time", "seconds", "a time"],
)
def test_a_retry_that_is_raised_by_hand_keeps_the_message(case, when, delay):
    if isinstance(when, timedelta):
        when += datetime.now(timezone.utc)
    run = case(raises(Retry("later", when=when)))
    assert run.ends() is State.DEFERRED
    assert run.delay == pytest.approx(delay, abs=5)


def test_a_retry_that_is_raised_by_hand_has_the_budgets_of_any_other(case):
    run = case(raises(Retry("later")), max_retries=0)
    assert run.ends() is State.DEAD_LETTERED
    assert run.report.error.exception_type.endswith("MaxRetriesExceededError")


def test_a_retry_of_the_tasks_own_that_publishes_is_not_retried_besides(case):
    copies = []

    class Publishes(SQSBackoffTask):
        abstract = True

        def retry(self, *args, **kwargs):
            copies.append(1)
            raise Retry("elsewhere")

    run = case(lambda self: self.retry(), base=Publishes)
    assert run.ends() is State.DONE
    assert copies == [1]
