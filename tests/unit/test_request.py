"""Each way a run can end settles its lease exactly once and frees its place."""

import json
import os
import signal as signals
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from billiard.einfo import ExceptionInfo
from celery import Celery
from celery.exceptions import (
    Ignore,
    Reject,
    Retry,
    Terminated,
    TimeLimitExceeded,
    WorkerLostError,
)
from celery.worker import state as worker_state
from celery.worker.request import Request
from kombu.message import Message

from celery_sqs_backoff import Outcome, Schedule, SQSBackoffTask
from celery_sqs_backoff.observe.events import Discarded, Parked, Retried
from celery_sqs_backoff.observe.stream import Events
from celery_sqs_backoff.retry.budget import GiveUpReason
from celery_sqs_backoff.retry.decision import End, Ended, GiveUp
from celery_sqs_backoff.retry.policies import Policy
from celery_sqs_backoff.safe import shared
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.sqs.memory import Memory
from celery_sqs_backoff.sqs.queues import Queue
from celery_sqs_backoff.sqs.redact import ErrorText
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.task.handover import BackoffRetry, Report, attach_report
from celery_sqs_backoff.worker import settler
from celery_sqs_backoff.worker.lease import Lease, State
from celery_sqs_backoff.worker.request import BackoffRequest, SettledBeforeRun

URL = "https://sqs.example/1/q"
WITH_DLQ = Queue(URL, dlq_arn="arn:aws:sqs:us-east-1:1:q-dlq")
WITHOUT_DLQ = Queue(URL)


class FakeKeeper:
    """Frees the place, and remembers who was settled."""

    def __init__(self):
        self.memory = Memory()
        self.events = Events()
        self.settlements = []

    def clock(self):
        return 1_000.0

    def settled(self, lease):
        self.settlements.append(lease.state)
        lease.free()

    def ended(self, lease):
        """Forget a lost message."""


class Run:
    """A message received by a worker, as a request, and what became of both."""

    def __init__(
        self, *, queue=WITH_DLQ, keeper=None, headers=None, facts=None, embed=None, **options
    ):
        self.app = Celery(
            "request", broker="memory://", backend="cache+memory://", set_as_current=False
        )

        @self.app.task(
            base=SQSBackoffTask,
            name="mail",
            lazy=False,
            shared=False,
            **{"backoff": Schedule([7])} | options,
        )
        def mail():
            """Send nothing."""

        self.keeper = keeper or FakeKeeper()
        self.freed = 0
        message = self._message(queue, facts or {}, headers or {}, json.dumps(embed))
        self.lease = message.sqs_lease
        self.request = BackoffRequest(
            message, app=self.app, task=mail, hostname="test@here", eventer=None
        )

    def _message(self, queue, facts, headers, embed):
        sent = self.app.amqp.as_task_v2("task-id", "mail", (), {})
        body, content_type, encoding = (
            f"[[], {{}}, {embed}]".encode(),
            "application/json",
            "utf-8",
        )
        message = Message(
            body=body,
            delivery_tag="tag",
            content_type=content_type,
            content_encoding=encoding,
            headers=sent.headers | headers,
            properties={**sent.properties, "delivery_info": {"sqs_message": {"Body": "b"}}},
            delivery_info={"routing_key": "q"},
            channel=None,
        )
        message.sqs_lease = Lease(
            calls=None,
            queue=queue,
            message={"ReceiptHandle": "h"},
            body="b",
            delivery=Delivery(
                **{"message_id": "m", "queue_url": URL, "received_at": time.time()} | facts
            ),
            received_at=1_000.0,
            keeper=self.keeper,
            free=self._free,
        )
        return message

    def _free(self):
        self.freed += 1

    @property
    def ended(self):
        """The lease's one settlement; that it is one, and the place is free."""
        assert self.freed == 1
        [settlement] = self.keeper.settlements
        return settlement

    @property
    def delay(self):
        return self.lease.due_at - self.keeper.clock()

    @property
    def result(self):
        return self.app.AsyncResult("task-id").state


def einfo(exc, report=None):
    try:
        raise exc
    except BaseException:  # noqa: BLE001
        info = ExceptionInfo()
    if report:
        attach_report(info, report)
    return info


def fails(run, exc, report=None):
    run.request.on_failure(einfo(exc, report))


NOT_RETRYABLE = Report(
    Ended(End.RAISED, GiveUp(GiveUpReason.NOT_RETRYABLE, Outcome.NOT_PROCESSED)),
    ErrorText(exception_type="mail.Error"),
)


@pytest.fixture(autouse=True)
def _no_revoked_or_stopping_worker():
    yield
    worker_state.revoked.clear()
    worker_state.should_terminate = worker_state.should_stop = None


# The ends that the task decides


def test_a_success_is_done():
    run = Run()
    run.request.on_success((False, None, 0.1))
    assert run.ended is State.DONE


def test_our_retry_hides_the_message_for_its_delay():
    run = Run()
    fails(run, BackoffRetry(exc=OSError("down"), when=42))
    assert run.ended is State.DEFERRED
    assert run.delay == 42


@pytest.mark.hazard("H22")
def test_a_backoff_for_which_there_is_no_room_is_parked():
    """With the delay that it had left. Its result stays RETRY: it waits, and has not failed."""
    run, told = Run(queue=replace(WITH_DLQ, messages_in_flight=96_000)), []
    run.keeper.events.subscribe(told.append)
    fails(run, BackoffRetry(exc=OSError("down"), when=600))
    assert run.ended is State.DEAD_LETTERED
    record = run.lease.record
    assert (record.reason, record.outcome) == ("parked", "RETRYABLE")
    assert record.due_at == pytest.approx(time.time() + 600, abs=5)
    assert [type(event) for event in told][-2:] == [Retried, Parked]


@pytest.mark.parametrize(
    ("facts", "park_above"),
    [
        pytest.param({"messages_in_flight": 95_999}, 0.8, id="room is left"),
        pytest.param({"messages_in_flight": 120_000}, None, id="never"),
        pytest.param({"messages_in_flight": 120_000, "dlq_arn": None}, 0.8, id="nowhere"),
        pytest.param({"messages_in_flight": 120_000, "url": f"{URL}.fifo"}, 0.8, id="FIFO"),
    ],
)
def test_a_backoff_is_hidden_where_it_is_not_parked(facts, park_above):
    run = Run(queue=replace(WITH_DLQ, **facts), park_above=park_above)
    fails(run, BackoffRetry(exc=OSError("down"), when=600))
    assert run.ended is State.DEFERRED


@pytest.mark.hazard("H1")
def test_a_retry_that_has_published_a_copy_is_done():
    """Hiding the original beside the copy would double the messages at each failure."""
    run = Run()
    fails(run, Retry(exc=OSError("down"), when=42))
    assert run.ended is State.DONE


def test_a_failure_is_a_dead_letter_with_the_reason_the_task_gave():
    run = Run()
    fails(run, ValueError("x"), NOT_RETRYABLE)
    assert run.ended is State.DEAD_LETTERED
    assert run.lease.record.reason == "not retryable"
    assert run.lease.record.outcome == "NOT_PROCESSED"
    assert run.lease.record.exception_type == "mail.Error"
    assert run.lease.record.attempts == 1


def test_a_failure_that_did_not_pass_through_the_task_is_unknown():
    run = Run()
    fails(run, ValueError("x"))
    assert run.ended is State.DEAD_LETTERED
    assert run.lease.record.outcome == "UNKNOWN"


def test_what_the_tasks_process_did_not_describe_is_masked():
    run = Run()
    fails(run, ValueError("password=hunter2"))
    assert run.lease.record.exception_message == "password=***"
    assert "hunter2" not in run.lease.record.traceback


@pytest.mark.parametrize("options", [{"record_detail": "type"}, {"redact": str.upper}])
def test_only_the_type_is_recorded_where_the_tasks_process_could_not_mask_it(options):
    """The user's masking may be slow, and the worker's main process must not wait for it."""
    run = Run(**options)
    fails(run, ValueError("card 4111"))
    record = run.lease.record
    assert record.exception_type == "builtins.ValueError"
    assert (record.exception_message, record.traceback) == (None, None)


@pytest.mark.parametrize(
    "options", [{"on_give_up": "fail"}, {"queue": WITHOUT_DLQ}], ids=["asked-for", "no-dlq"]
)
def test_a_failure_without_a_dead_letter_is_done(options):
    run = Run(**options)
    fails(run, ValueError("x"), NOT_RETRYABLE)
    assert run.ended is State.DONE


def test_reject_without_requeue_is_a_dead_letter():
    run = Run()
    fails(run, Reject("no", requeue=False))
    assert run.ended is State.DEAD_LETTERED
    assert run.lease.record.reason == "rejected by the task"


def test_reject_with_requeue_comes_back_after_a_delay_not_in_a_hot_loop():
    run = Run()
    fails(run, Reject("later", requeue=True))
    assert run.ended is State.DEFERRED
    assert run.delay == 7


def test_an_ignored_run_is_done():
    run = Run()
    fails(run, Ignore())
    assert run.ended is State.DONE


# Crashes


@pytest.mark.parametrize(
    "exc", [WorkerLostError("lost"), TimeLimitExceeded(5), SystemExit(1), MemoryError()], ids=repr
)
def test_a_crash_below_the_budget_backs_off(exc):
    run = Run(crash_budget=2)
    fails(run, exc)
    assert run.ended is State.DEFERRED
    assert run.delay == 7
    assert run.result == "RETRY"


def test_a_crash_comes_back_only_when_the_old_process_is_gone():
    run = Run(backoff=Schedule([0]))
    fails(run, TimeLimitExceeded(5))
    assert run.delay >= 2


@pytest.mark.parametrize(
    ("exc", "reason"),
    [(WorkerLostError("lost"), "worker lost"), (TimeLimitExceeded(5), "hard time limit")],
)
def test_the_crash_that_uses_up_the_budget_is_a_dead_letter(exc, reason):
    run = Run(crash_budget=1)
    fails(run, exc)
    assert run.ended is State.DEAD_LETTERED
    assert run.lease.record.reason == reason


@pytest.mark.hazard("H4")
def test_a_hard_limit_is_settled_once_if_the_failure_is_reported_first():
    """As on prefork: billiard calls on_failure, then on_timeout, and kills only then."""
    run = Run()
    fails(run, TimeLimitExceeded(5))
    run.request.on_timeout(soft=False, timeout=5)
    assert run.ended is State.DEFERRED
    assert run.result == "RETRY"


@pytest.mark.hazard("H4")
def test_a_hard_limit_is_settled_once_if_only_the_timeout_is_reported():
    """As on gevent."""
    run = Run()
    run.request.on_timeout(soft=False, timeout=5)
    assert run.ended is State.DEFERRED


@pytest.mark.hazard("H4")
def test_a_hard_limit_is_settled_once_if_the_timeout_is_reported_first():
    run = Run()
    run.request.on_timeout(soft=False, timeout=5)
    run.request.on_failure(einfo(TimeLimitExceeded(5)))
    assert run.ended is State.DEFERRED


def test_a_soft_limit_settles_nothing():
    run = Run()
    run.request.on_timeout(soft=True, timeout=5)
    assert run.keeper.settlements == []


# The worker's own doing


@pytest.mark.hazard("H8")
@pytest.mark.parametrize("exc", [WorkerLostError("lost"), Terminated(9)], ids=repr)
def test_a_run_that_a_cold_shutdown_ends_is_given_back(exc):
    worker_state.should_terminate = True
    run = Run()
    told = []
    run.keeper.events.subscribe(told.append)
    fails(run, exc)
    assert run.ended is State.RELEASED
    [retried] = told
    assert isinstance(retried, Retried)
    assert (retried.reason, retried.delay, retried.outcome) == ("cancelled", 0, "unknown")


def test_a_process_that_is_lost_while_the_worker_stops_is_no_crash():
    """Supervisors signal the whole process group, pool processes included."""
    worker_state.should_stop = 0  # Celery's exit code
    run = Run(crash_budget=1)
    fails(run, WorkerLostError("signal 15 (SIGTERM)"))
    assert run.ended is State.RELEASED
    assert run.keeper.memory.crashes("m") == 0


@pytest.mark.parametrize("reported", [True, False])
def test_a_run_that_ends_with_its_worker_is_in_doubt_for_the_next(reported):
    """At every deploy: a provider that is down then says nothing of the call before."""
    worker_state.should_stop = 0
    run = Run()
    run.app.conf.sqs_backoff = {"store": MemoryStore()}
    if reported:
        fails(run, WorkerLostError("signal 15 (SIGTERM)"))
    else:
        run.request.cut_short()
    assert run.ended is State.RELEASED
    assert shared.is_in_doubt(run.app, "mail", "task-id")


def test_a_success_that_was_stored_before_the_process_was_lost_does_not_count(monkeypatch):
    """Celery 5.7 asks for it when the message is settled already: its chord would never end."""
    monkeypatch.setattr(Request, "_success_was_stored", lambda self: {"result": 1}, raising=False)
    run = Run(embed={"chord": {"task": "body"}}, crash_budget=1)
    told = []
    monkeypatch.setattr(run.app.backend, "mark_as_failure", lambda *_, **__: told.append("failed"))
    fails(run, WorkerLostError("signal 9 (SIGKILL)"))
    assert run.ended is State.DEAD_LETTERED
    assert told == ["failed"]


def test_a_time_limit_while_the_worker_stops_is_a_crash_as_ever():
    worker_state.should_stop = 0
    run = Run(crash_budget=1)
    fails(run, TimeLimitExceeded(1))
    assert run.ended is State.DEAD_LETTERED


def test_a_run_that_ends_with_its_worker_is_told_of():
    run = Run()
    told = []
    run.keeper.events.subscribe(told.append)
    run.request.cut_short()
    assert run.ended is State.RELEASED
    assert [type(event) for event in told] == [Retried]


@pytest.mark.hazard("H8")
def test_a_terminated_run_is_done():
    """``revoke(terminate=True)``: somebody does not want it to run."""
    run = Run()
    fails(run, Terminated(signals.SIGTERM))
    assert run.ended is State.DONE


@pytest.mark.hazard("H8", "H27")
def test_a_revoked_message_is_done():
    run = Run()
    worker_state.revoked.add("task-id")
    assert run.request.revoked()
    assert run.ended is State.DONE


@pytest.mark.hazard("H26")
def test_an_expired_message_is_done():
    run = Run(headers={"expires": "2001-01-01T00:00:00+00:00"})
    assert run.request.revoked()
    assert run.ended is State.DONE


def droppable(ending):
    """A run of a message that is to be dropped so."""
    return Run(headers={"expires": "2001-01-01T00:00:00+00:00"} if ending == "expired" else None)


def drop(run, ending):
    """Let the message be revoked, expired, or its task terminated."""
    if ending == "revoked":
        worker_state.revoked.add("task-id")
    if ending == "terminated":
        fails(run, Terminated(signals.SIGTERM))
    else:
        assert run.request.revoked()


@pytest.mark.parametrize("ending", ["revoked", "expired", "terminated"])
def test_what_an_earlier_run_has_done_is_taken_back_of_a_message_that_is_dropped(
    ending, monkeypatch
):
    """Its workflow would stay half done, and nobody would ever come back to it."""
    taken_back = []
    monkeypatch.setattr(
        settler,
        "compensate_given_up",
        lambda app, *message, **_: taken_back.append(message) or True,
    )
    run = droppable(ending)
    drop(run, ending)
    assert taken_back == [("mail", "task-id")]
    assert run.ended is State.DONE


@pytest.mark.parametrize("may_go", [False, True])
@pytest.mark.parametrize("ending", ["revoked", "expired", "terminated"])
def test_a_message_that_is_dropped_is_announced_once_its_workflow_is_taken_back(
    ending, may_go, monkeypatch
):
    """``task_revoked`` was sent every 30 seconds, for as long as the store was away."""
    announced = []
    monkeypatch.setattr(settler, "compensate_given_up", lambda *_, **__: may_go)
    monkeypatch.setattr(
        "celery.worker.request.send_revoked", lambda *_, **facts: announced.append(facts)
    )
    run = droppable(ending)
    drop(run, ending)
    assert run.ended is (State.DONE if may_go else State.DEFERRED)
    assert len(announced) == may_go


@pytest.mark.parametrize("is_lost", [False, True], ids=["ours", "lost"])
@pytest.mark.parametrize("ending", ["revoked", "expired", "terminated"])
def test_a_message_that_is_dropped_is_reported_unless_it_was_lost(ending, is_lost):
    """In an outage calls that expire were deleted, and no number said so."""
    run = droppable(ending)
    told = []
    run.keeper.events.subscribe(told.append)
    if is_lost:
        run.lease.lose()
        told.clear()
    drop(run, ending)
    assert ending == "terminated" or run.request.revoked()
    assert [type(event) for event in told] == ([] if is_lost else [Discarded])


def test_what_has_been_given_back_is_not_started():
    run = Run()
    run.lease.release()
    assert run.request.revoked()
    assert run.ended is State.RELEASED


@pytest.mark.parametrize("pid", [os.getpid(), os.getpid() + 1], ids=["greenlet", "process"])
def test_what_may_be_running_elsewhere_is_not_started(pid):
    """This process was stopped for longer than the message was hidden."""
    run = Run()
    run.lease.visible_at = run.keeper.clock()
    if pid == os.getpid():
        with pytest.raises(SettledBeforeRun):
            run.request.on_accepted(pid, 0.0)
    else:
        assert run.request.revoked()
    assert run.lease.state is State.LOST


@pytest.mark.hazard("H5")
def test_a_callback_that_raises_settles_all_the_same(monkeypatch, caplog):
    """In most pools nobody would see it, and the place would be taken for good."""
    run = Run()

    def down(*args, **kwargs):
        raise OSError("the result backend is down")

    monkeypatch.setattr(type(run.request.task.backend), "mark_as_retry", down)
    fails(run, WorkerLostError("lost"))
    assert run.ended is State.DEFERRED
    assert "sqs_backoff.callback_failed" in caplog.text


def test_only_the_first_end_counts():
    run = Run()
    run.request.on_success((False, None, 0.1))
    fails(run, ValueError("x"))
    assert run.ended is State.DONE


# What the run is told


@pytest.mark.hazard("H2")
def test_retries_and_redelivered_say_what_sqs_knows():
    run = Run(facts={"receive_count": 4})
    assert run.request._request_dict["retries"] == 3
    assert run.request.delivery_info["redelivered"] is True
    first = Run()
    assert first.request._request_dict["retries"] == 0
    assert first.request.delivery_info["redelivered"] is False


@pytest.mark.parametrize("forged", [-5, "7", [], {}, None, 1.5, True])
def test_a_forged_count_of_retries_is_ignored(forged):
    """A policy that is asked for attempt -5 raises, which would hide the task's own error."""
    run = Run(headers={"retries": forged}, facts={"receive_count": 4})
    assert run.request._request_dict["retries"] == 3


def test_a_count_of_retries_that_no_message_has_is_cut():
    assert Run(headers={"retries": 10**30}).request._request_dict["retries"] == 1_000_000


def test_the_body_does_not_travel_twice():
    info = Run().request._request_dict["properties"]["delivery_info"]
    assert "Body" not in info["sqs_message"]


def test_a_message_whose_budget_was_used_up_before_this_receive_is_not_run():
    keeper = FakeKeeper()
    keeper.memory.count_crash("m")
    with pytest.raises(SettledBeforeRun):
        Run(keeper=keeper, max_retries=0, facts={"receive_count": 4})
    assert keeper.settlements == [State.DEAD_LETTERED]


@pytest.mark.parametrize("receives", [1, 2, 4])
def test_a_message_that_was_never_started_is_not_given_up_by_a_count(receives):
    """After a SIGTERM, or a hop on the way to its ETA, it has been received but not run."""
    run = Run(max_retries=0, facts={"receive_count": receives, "max_receive_count": 2})
    assert run.keeper.settlements == []


class BrokenPolicy(Policy):
    """A policy of a user's that was not written for so many attempts."""

    def ceiling(self, attempt):
        raise IndexError(attempt)


@pytest.mark.parametrize(
    ("exc", "state", "is_asked"),
    [
        (WorkerLostError(), State.DEFERRED, True),
        (Reject(requeue=True), State.DEFERRED, True),
        (OSError(), State.DEAD_LETTERED, False),
        (None, State.DONE, False),
    ],
)
def test_a_policy_is_asked_for_a_retry_only_and_may_raise(exc, state, is_asked, caplog):
    run = Run(backoff=BrokenPolicy())
    if exc is None:
        run.request.on_success((False, None, 0.1))
    else:
        fails(run, exc)
    assert run.ended is state
    assert ("sqs_backoff.backoff_broken" in caplog.text) is is_asked


@pytest.mark.parametrize(
    ("exc", "state"), [(None, State.DONE), (WorkerLostError(), State.DEFERRED)]
)
def test_whatever_fails_while_a_message_is_settled_it_is_settled(exc, state, monkeypatch, caplog):
    """A store, or a provider's gate: the message would be held, and renewed, for 12 hours."""
    run = Run()

    def fail(*args):
        raise LookupError("secret")

    run.request._settler._gate = SimpleNamespace(ended=fail)
    if exc is None:
        run.request.on_success((False, None, 0.1))
    else:
        fails(run, exc)
    assert run.ended is state
    assert "settle_failed" in caplog.text
    assert "secret" not in caplog.text


def test_a_greenlet_or_thread_whose_message_was_lost_before_it_began_ends_its_lease():
    """Else a later receive would be taken for one of a task that runs, and nobody would run it."""
    run, ended = Run(), []
    run.lease.handed_to_pool = lambda: True
    run.keeper.ended = ended.append
    run.lease.lose()
    with pytest.raises(SettledBeforeRun):
        run.request.on_accepted(os.getpid(), 0.0)
    assert ended == [run.lease]


@pytest.mark.parametrize("crash_budget", [1, 2])
def test_a_hard_time_limit_that_is_final_calls_the_hooks_of_a_failure_once(crash_budget):
    """As Celery 5.7 does."""
    told = []
    run = Run(
        crash_budget=crash_budget,
        on_failure=lambda task, exc, *_: told.append(type(exc)),
        after_return=lambda task, state, *_: told.append(state),
    )
    fails(run, TimeLimitExceeded(1))
    run.request.on_timeout(False, 1)
    assert told == ([TimeLimitExceeded, "FAILURE"] if crash_budget == 1 else [])


@pytest.mark.parametrize("pid", [os.getpid(), os.getpid() + 1], ids=["greenlet", "process"])
def test_a_run_that_celery_fails_to_begin_with_is_not_held_for_good(pid, monkeypatch):
    """A greenlet or thread would end without a word. A pool process runs the task all the same."""

    def fails_to_begin(request, *args):
        raise NotImplementedError

    monkeypatch.setattr("celery.worker.request.Request.on_accepted", fails_to_begin)
    run = Run()
    run.lease.slot_at = 1.0
    with pytest.raises((SettledBeforeRun, NotImplementedError)):
        run.request.on_accepted(pid, 0.0)
    if pid == os.getpid():
        assert run.ended is State.DEFERRED
    else:
        assert run.lease.state is State.HELD
    assert run.lease.slot_at is None, "its slot is used: another message may have the next"


def test_a_refused_run_compensates_nothing_in_the_main_process(monkeypatch):
    """It has seen to that in its own; another message may go on with its workflow."""
    monkeypatch.setattr(settler, "compensate_given_up", lambda *_, **__: False)
    run = Run()
    word = GiveUp(GiveUpReason.NOT_HANDED_ON, Outcome.UNKNOWN)
    fails(run, Ignore(), Report(Ended(End.IGNORED, word), ErrorText()))
    assert run.ended is State.DEAD_LETTERED


def test_a_run_that_returned_is_not_repeated_because_the_store_is_away(monkeypatch):
    """Its part of a chord could not be stored: the same Redis. Its workflows have all ended."""
    monkeypatch.setattr(settler, "compensate_given_up", lambda *_, **__: False)
    run = Run()
    word = GiveUp(GiveUpReason.NOT_HANDED_ON, Outcome.UNKNOWN)
    fails(run, OSError(), Report(Ended(End.RETURNED, word), ErrorText()))
    assert run.ended is State.DEAD_LETTERED
    assert run.lease.record.reason == GiveUpReason.NOT_HANDED_ON.value


def test_a_run_that_raised_without_its_word_is_not_repeated_because_the_store_is_away(monkeypatch):
    """It may have done its work. To take its workflow back is tried once."""
    asked = []
    monkeypatch.setattr(settler, "compensate_given_up", lambda *_, **__: asked.append(1))
    run = Run()
    fails(run, ValueError())
    assert (run.ended, asked) == (State.DEAD_LETTERED, [1])


@pytest.mark.parametrize("is_crash", [True, False])
def test_the_steps_of_a_run_that_was_lost_are_not_waited_for(is_crash, monkeypatch):
    lost = []
    monkeypatch.setattr(
        settler, "compensate_given_up", lambda *_, lost_run: lost.append(lost_run) or True
    )
    run = Run(crash_budget=1)
    fails(run, WorkerLostError("killed") if is_crash else Terminated(signals.SIGTERM))
    assert lost == [run.lease.delivery.run_id if is_crash else ""]


def test_a_crash_that_is_given_up_comes_back_while_the_store_is_away(monkeypatch):
    """Its workflows are to be taken back first."""
    monkeypatch.setattr(settler, "compensate_given_up", lambda *_, **__: False)
    run = Run(crash_budget=1)
    fails(run, WorkerLostError("killed"))
    assert run.ended is State.DEFERRED


@pytest.mark.parametrize("may_go", [False, True])
def test_a_message_that_is_not_run_and_comes_back_has_not_failed(may_go, monkeypatch):
    """Its ``link_error`` was called every 30 seconds, for as long as the store was away."""
    failed = []
    monkeypatch.setattr(settler, "compensate_given_up", lambda *_, **__: may_go)
    monkeypatch.setattr(Request, "on_failure", lambda *arguments: failed.append("failed"))
    keeper = FakeKeeper()
    keeper.memory.count_crash("m")
    with pytest.raises(SettledBeforeRun):
        Run(keeper=keeper, max_retries=0, facts={"receive_count": 4})
    assert keeper.settlements == [State.DEAD_LETTERED if may_go else State.DEFERRED]
    assert failed == (["failed"] if may_go else [])


def test_a_crash_that_is_given_up_at_the_last_receive_is_a_dead_letter_with_its_reason(
    monkeypatch,
):
    monkeypatch.setattr(settler, "compensate_given_up", lambda *_, **__: False)
    run = Run(crash_budget=1, facts={"receive_count": 3, "max_receive_count": 3})
    fails(run, WorkerLostError("killed"))
    assert run.ended is State.DEAD_LETTERED
    assert run.lease.record.reason == GiveUpReason.WORKER_LOST.value


class HangingStore(MemoryStore):
    """Answers nothing until ``goes_on``."""

    def __init__(self):
        super().__init__()
        self.goes_on = threading.Event()

    def __getattribute__(self, name):
        if name in ("add", "get", "replace", "delete"):
            self.goes_on.wait(60)
        return super().__getattribute__(name)


@pytest.mark.parametrize("crash_budget", [5, 1])
def test_a_store_that_hangs_does_not_hold_up_the_event_loop(crash_budget, monkeypatch):
    """Not every client has a timeout: a database's waits for as long as the network is silent."""
    monkeypatch.setattr(shared, "_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(shared, "_HANGS_SECONDS", 0.0)
    run, store = Run(crash_budget=crash_budget), HangingStore()
    run.app.conf.sqs_backoff = {"store": store}
    timer = threading.Timer(30, store.goes_on.set)
    timer.start()
    fails(run, WorkerLostError("SIGKILL"))
    assert not store.goes_on.is_set(), "the event loop has waited"
    assert run.ended is State.DEFERRED
    assert shared._is_left_alone(run.app)
    timer.cancel()
    store.goes_on.set()


@pytest.fixture
def hangs():
    """What a result backend does that accepts a connection, and is silent from then on."""
    goes_on = threading.Event()
    timer = threading.Timer(30, goes_on.set)
    timer.start()

    def hang(*args, **kwargs):
        assert goes_on.wait(60)

    hang.goes_on = goes_on
    yield hang
    goes_on.set()
    timer.cancel()


def test_a_result_backend_that_hangs_does_not_block_the_event_loop(monkeypatch, caplog, hangs):
    """Redis for two minutes and more, a database for good: neither results nor signals come in."""
    hooks = []
    run = Run(on_retry=lambda self, *args: hooks.append("on_retry"))
    monkeypatch.setattr(type(run.request.task.backend), "mark_as_retry", hangs)
    fails(run, WorkerLostError("SIGKILL"))
    assert not hangs.goes_on.is_set(), "the event loop has waited"
    assert run.ended is State.DEFERRED
    assert hooks == ["on_retry"]
    assert "BackendHangs" in caplog.text


@pytest.mark.parametrize("exc", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_task_that_ends_its_process_is_shown_as_retried(monkeypatch, caplog, exc):
    """Celery before 5.7 cannot store such an exception, so neither hook nor signal was called."""
    run, stored, hooks = Run(on_retry=lambda self, exc, *_: hooks.append(exc)), [], []
    backend = type(run.request.task.backend)
    monkeypatch.setattr(
        backend, "mark_as_retry", lambda self, _, exc, *__, **___: stored.append(exc)
    )
    fails(run, exc)
    assert run.ended is State.DEFERRED
    [failure] = stored
    assert hooks == stored
    assert repr(failure) == f"WorkerLostError('The run was aborted: {type(exc).__name__}')"
    assert "callback_failed" not in caplog.text


def test_a_result_backend_that_is_down_does_not_keep_a_worker_from_cancelling_the_next(caplog):
    """Celery 5.5 and 5.6 cancel all in one loop, at a lost connection, and contain nothing."""

    class Backend:
        def mark_as_retry(self, *args, **kwargs):
            raise ConnectionError("away: redis://user:password@host")

    run, ended = Run(), []
    run.request.task.backend = Backend()
    run.request.time_start = 1.0
    pool = SimpleNamespace(terminate_job=lambda pid, signal: ended.append(pid))
    run.request.cancel(pool)
    assert ended == [None]
    assert run.request._already_cancelled
    assert "callback_failed" in caplog.text
    assert "password" not in caplog.text
    fails(run, Terminated(15))
    assert run.ended is State.RELEASED


def test_no_line_of_the_log_shows_an_id_as_its_sender_wrote_it(caplog):
    hostile = "id\n[ERROR] forged line " + "x" * 10_000
    caplog.set_level("INFO")
    run = Run(headers={"id": hostile})
    run.request.on_timeout(soft=False, timeout=5)
    lines = [r.getMessage() for r in caplog.records if "celery_sqs_backoff" in r.name]
    assert len(lines) > 1
    assert not [line for line in lines if "\n" in line or len(line) > 1_000]


@pytest.mark.parametrize("queue", [WITH_DLQ, WITHOUT_DLQ], ids=["dead letter", "delete"])
@pytest.mark.parametrize(
    ("exc", "report"),
    [(BackoffRetry(exc=OSError("down"), when=42), None), (OSError("no"), NOT_RETRYABLE)],
    ids=["retry", "give up"],
)
def test_of_a_lost_message_only_the_run_is_counted(exc, report, queue):
    """Another worker has it, and counts what becomes of it.

    Given up here, it was deleted when it came back to this worker, and nobody was left to go on
    with its workflow.
    """
    run, seen = Run(queue=queue), []
    run.keeper.events.subscribe(seen.append)
    run.keeper.ended = lambda lease: None
    run.lease.lose()
    fails(run, exc, report)
    kinds = [type(event).__name__ for event in seen]
    assert kinds.count("RunEnded") == 1
    assert {"Retried", "DeadLettered", "Hidden"}.isdisjoint(kinds)
    assert not run.keeper.memory.knows("m"), "it runs again"
