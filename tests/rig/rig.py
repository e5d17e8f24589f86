"""The rig: one SQS, one clock, one Celery app, and any number of workers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

from celery import Celery
from celery.backends.cache import _DUMMY_CLIENT_CACHE
from celery.events import EventDispatcher
from kombu import transport

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.sqs.dead_letter import DeadLetterRecord, read_record

from ..support import fake_sqs_queue
from ..support.fake_sqs import Fault
from .parts import threads_replaced
from .sqs import URL, Call, RecordingSQS, transport_to
from .timeline import Timeline
from .worker import Run, Worker, swap_state

#: A worker settles a message within this time. It waits a moment for more messages, to settle them
#: with the same call.
_SETTLED_SECONDS = 0.5

#: If the rig shall run a message, the pool must get the message within this time.
_ARRIVES_SECONDS = 20.0


class Message:
    """A message that the rig has sent, and its state in SQS."""

    def __init__(self, rig: Rig, sent: fake_sqs_queue.Message, url: str, task_id: str) -> None:
        self._rig, self._sent, self._url = rig, sent, url
        self.task_id = task_id
        self.message_id = sent.id

    @property
    def fate(self) -> str:
        """The state of the message, as one of these words.

        - deleted
        - dead letter: the worker has sent it to the dead-letter queue, with a record of the reason
        - moved: it is in the dead-letter queue without a record
        - held: a worker has a lease on it
        - hidden
        - visible: a worker gave it back, or it was never received
        """
        if self._rig.sqs.queues[self._url].dlq is not None and self._dead_letter() is not None:
            return "dead letter" if self.record is not None else "moved"
        if self._sent not in self._rig.sqs.queues[self._url].messages:
            return "deleted"
        if self._sent.visible_at <= self._rig.timeline.now:
            return "visible"
        is_held = any(self.message_id in worker.held for worker in self._rig.workers)
        return "held" if is_held else "hidden"

    @property
    def delay(self) -> int:
        """The visibility timeout in seconds that the last change of its visibility has set."""
        changes = [change for change in self._rig.sqs.changes if change.message is self._sent]
        return changes[-1].seconds

    def forge(self, **headers: Any) -> None:
        """Change headers of the message, as another publisher or an attacker could write them."""
        body = json.loads(self._sent.body)
        body["headers"].update(headers)
        self._sent.body = json.dumps(body)

    def deliver_again(self) -> None:
        """Let SQS deliver a hidden or deleted message again. SQS delivers at least once."""
        queue = self._rig.sqs.queues[self._url]
        if self._sent not in queue.messages:
            queue.messages.append(self._sent)
        self._sent.visible_at = self._rig.timeline.now
        self._rig._wake("SendMessage")
        self._rig.pass_time(0)

    @property
    def receives(self) -> int:
        return self._sent.receives

    @property
    def record(self) -> DeadLetterRecord | None:
        """The record of its dead letter, or None."""
        letter = self._dead_letter()
        if letter is None:
            return None
        return read_record({"MessageAttributes": letter.attributes})

    @property
    def result(self) -> str:
        """The state of its task in the result backend."""
        return str(self._rig.app.AsyncResult(self.task_id).state)

    @property
    def stored(self) -> Any:
        """The value of its task's result, or the exception."""
        return self._rig.app.AsyncResult(self.task_id).result

    def _dead_letter(self) -> fake_sqs_queue.Message | None:
        dlq = self._rig.sqs.queues[self._url].dlq
        letters = [] if dlq is None else dlq.messages
        return next((each for each in letters if each.body == self._sent.body), None)


def _dispatcher_to(heard: list[SimpleNamespace]) -> type:
    """Return a class that notes Celery's events instead of sending them."""

    class Dispatcher(EventDispatcher):  # type: ignore[misc]
        on_enabled = on_disabled = ()

        def __init__(self, *_: Any, **__: Any) -> None:
            self.enabled, self.connection, self.groups = True, None, set[str]()

        def send(self, kind: str, **fields: Any) -> None:
            heard.append(SimpleNamespace(type=kind, **fields))

        def close(self, *_: Any) -> None: ...

        extend_buffer = flush = close

    return Dispatcher


class Rig:
    """A Celery app on a strict SQS in virtual time. Use it as a context manager.

    Attributes:
        app: the Celery app, with a result backend in memory.
        sqs: the fake SQS.
        timeline: the clock. ``rig.timeline.now`` is in seconds since the epoch.
        events: the events that the workers have sent to their observers.
        celery_events: Celery's own events, as Flower gets them, with ``type`` and their fields.
        workers: all workers that were started.
        latency: how many seconds a call about a message takes to SQS and back.
        on_run: called with each task that a pool takes. By default the task waits for ``rig.run``.
        pool_timeout: the exception that the pool raises in a task at its hard time limit, as
            gevent's pool does. None means that the pool raises nothing.
    """

    def __init__(self, *, max_in_flight: int = 120_000, seed: int = 7, **conf: Any) -> None:
        self.timeline = Timeline()
        self.rng = random.Random(seed)
        self.sqs = RecordingSQS(self.timeline, max_in_flight=max_in_flight)
        self.sqs.on_call = self._wake
        self.events: list[Any] = []
        self.celery_events: list[SimpleNamespace] = []
        self.workers: list[Worker] = []
        self.latency = 0.0
        self.on_run: Callable[[Run], object] = lambda run: None
        self.pool_timeout: type[BaseException] | None = None
        self._transport = transport_to(self.sqs)
        self._acting: Worker | None = None
        self.app = Celery(
            "rig", broker="sqs://localhost", backend="cache+memory://", set_as_current=False
        )
        self.app.conf.update(
            {
                "broker_transport": self._transport,
                "worker_enable_remote_control": False,
                "task_default_queue": "q",
                "worker_prefetch_multiplier": 4,
                **conf,
            }
        )
        self.app.events.dispatcher_cls = _dispatcher_to(self.celery_events)

    def __enter__(self) -> Rig:
        self._stack = stack = ExitStack()
        _DUMMY_CLIENT_CACHE.clear()
        random_state = random.getstate()
        stack.callback(random.setstate, random_state)
        random.seed(self.rng.random())
        stack.callback(self._close)
        stack.enter_context(self.timeline)
        stack.enter_context(mock.patch("kombu.utils.limits.monotonic", self.timeline))
        stack.enter_context(threads_replaced(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _close(self) -> None:
        for worker in self.workers:
            worker.kill()
        swap_state(None, None)
        transport._transport_cache.pop(self._transport, None)

    # Queues, tasks and workers

    def queue(
        self, name: str = "q", *, dlq: bool = True, max_receive_count: int = 100, **attributes: Any
    ) -> str:
        """Make a queue, by default with a dead-letter queue, and return its URL.

        ``attributes`` are those of CreateQueue. ``FifoQueue="true"`` needs a name like "q.fifo".
        """
        if dlq:
            stem, dot, end = name.partition(".")
            letters = f"{stem}-dlq{dot}{end}"
            fifo = {key: value for key, value in attributes.items() if key == "FifoQueue"}
            self.sqs.create_queue(QueueName=letters, Attributes=fifo)
            arn = self.sqs.queues[URL + letters].arn
            policy = {"deadLetterTargetArn": arn, "maxReceiveCount": max_receive_count}
            attributes["RedrivePolicy"] = json.dumps(policy)
        self.sqs.create_queue(QueueName=name, Attributes=attributes)
        return URL + name

    def task(
        self,
        body: Callable[..., Any],
        *,
        name: str = "mail",
        base: type = SQSBackoffTask,
        **options: Any,
    ) -> Any:
        """Define a task, before the first worker starts. Its body gets the task as ``self``."""
        if body.__name__ == "<lambda>":
            body.__name__ = "body"  # Celery uses it as a Python name
        return self.app.task(
            body, name=name, base=base, bind=True, lazy=False, shared=False, **options
        )

    def start_worker(
        self,
        name: str | None = None,
        *,
        queues: Iterable[str] = (),
        processes: int = 1,
        pool: str = "prefork",
    ) -> Worker:
        """Start a worker with a pool of "prefork", "threads", "greenlets" or "solo"."""
        if not self.sqs.queues:
            self.queue()
        name = name or f"worker{len(self.workers) + 1}@here"
        worker = Worker(self, name, queues=queues, processes=processes, pool=pool)
        self.workers.append(worker)
        return worker

    @property
    def worker(self) -> Worker:
        """The worker that was started last. If there is no worker, start one with the defaults."""
        return self.workers[-1] if self.workers else self.start_worker()

    # What a test does

    def send(
        self, name: str = "mail", args: Any = (), kwargs: Any = None, **options: Any
    ) -> Message:
        """Publish a task with Celery. ``options`` are those of ``apply_async``."""
        if not self.sqs.queues:
            self.queue()
        task = self.app.tasks.get(name)
        send = (
            self.app.send_task
            if task is None
            else lambda _, *call, **opts: task.apply_async(*call, **opts)
        )
        task_id = send(name, args, kwargs, **options).id
        call = self.calls("SendMessage")[-1]
        url = call.arguments["QueueUrl"]
        sent = next(m for m in self.sqs.queues[url].messages if m.id == call.answer["MessageId"])
        return Message(self, sent, url, task_id)

    def begin(self) -> Run:
        """Wait until the worker's pool has taken a task, and let the task begin."""
        worker = self.worker

        def waiting() -> list[Run]:
            return [run for run in worker.runs if not run.has_begun]

        self.pass_time(_ARRIVES_SECONDS, until=lambda: bool(waiting()))
        assert waiting(), "no task has arrived"
        return waiting()[0].begin()

    def run(self, end: Callable[[Run], object] = Run.finish) -> Run:
        """Run the next task to this end, such as ``Run.lose``, and wait until it is settled."""
        run = self.begin()
        end(run)
        self.pass_time(_SETTLED_SECONDS)
        return run

    def pass_time(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, and everything happen that is due. Stop early if ``until()`` is true.

        Tasks do not run by themselves. The body of a task may call this, so that the task takes
        some time.
        """
        self.timeline.pass_time(seconds, until)

    def fault(
        self,
        action: str,
        error: str | Exception | None = "InternalError",
        *,
        seconds: float | None = None,
        times: int = 1,
        answer_lost: bool = False,
        entries: Iterable[int] | None = None,
        queue: str | None = None,
    ) -> None:
        """Let the next calls of an action fail, or all of its calls for some seconds.

        Arguments:
            action: the name of the SQS call. With ``seconds``, "*" means all but SendMessage.
            error: the exception, or the code of the error. With None, the response is empty.
            answer_lost: whether SQS carries out the call, so that only the response is lost.
            entries: the positions in a batch that fail. With None, the whole call fails.
            queue: the URL of the only queue whose calls fail. It works only with ``seconds``.
        """
        which = None if entries is None else frozenset(entries)
        fault = Fault(action, error, after=answer_lost, entries=which)
        if seconds is None:
            self.sqs.faults += [fault] * times
        else:
            self.sqs.fail_until(self.timeline.now + seconds, fault, queue)

    def during(self, action: str, do: Callable[[], object], *, times: int = 1) -> None:
        """Do something while the next calls of an action are under way.

        SQS has then carried out the call, but its response has not arrived yet.
        """
        self.sqs.under_way += [(action, do)] * times

    def fail_results(self, fails: Callable[[str, int], Any] = lambda state, nth: True) -> list[str]:
        """Let the result backend fail, by default always.

        ``fails`` gets the state to store, and how often the backend was asked to store this state,
        from 1. It returns an exception to raise, True to raise a connection error, or False to
        store the state.

        Returns:
            A list to which the backend adds each state that it is asked to store.
        """
        # Patch the class, because each thread has a backend of its own.
        kind, seen = type(self.app.backend), list[str]()
        store = kind.store_result

        def store_result(it: Any, task_id: str, result: Any, state: str, **options: Any) -> Any:
            seen.append(state)
            if exc := fails(state, seen.count(state)):
                away = ConnectionError("away: redis://user:password@host")
                raise exc if isinstance(exc, BaseException) else away
            return store(it, task_id, result, state, **options)

        self._stack.enter_context(mock.patch.object(kind, "store_result", store_result))
        return seen

    # What a test checks

    def calls(self, action: str | None = None) -> list[Call]:
        """Return the calls that SQS has got, of all actions or of one."""
        return [call for call in self.sqs.calls if action in (None, call.action)]

    @property
    def published(self) -> list[str]:
        """The names of the tasks whose messages were sent, in order."""
        bodies = [call.arguments["MessageBody"] for call in self.calls("SendMessage")]
        return [json.loads(body)["headers"]["task"] for body in bodies]

    def told(self, kind: str) -> list[Any]:
        """Return the events of a kind, such as ``"Retried"``, that observers have got."""
        return [event for event in self.events if type(event).__name__ == kind]

    def story(self) -> list[str]:
        """Return the events about runs and their messages in order, each as a line of text."""
        told = {
            "RunEnded": "ran: {outcome}",
            "Retried": "retried in {delay:g} s: {reason}, {outcome}",
            "DeadLettered": "given up: {reason}, {outcome}",
            "Discarded": "discarded",
            "LeaseLost": "lost",
        }
        lines = []
        for event in self.events:
            if (line := told.get(type(event).__name__)) is not None:
                facts = {name: getattr(event, name) for name in event.__dataclass_fields__}
                kept = "" if facts.get("is_kept", True) else ", not kept"
                lines.append(line.format(**facts) + kept)
        return lines

    # For the workers

    @property
    def acting_worker(self) -> Worker:
        assert self._acting is not None
        return self._acting

    def let_act(self, worker: Worker | None) -> Worker | None:
        """Note that the code of this worker runs now. Return the worker whose code ran before."""
        before, self._acting = self._acting, worker
        if worker is not None and worker is not self._state_of:
            swap_state(self._state_of, worker)
            self._state_of = worker
        return before

    _state_of: Worker | None = None

    def _wake(self, action: str) -> None:
        if action in ("SendMessage", "SendMessageBatch", "ChangeMessageVisibilityBatch"):
            for worker in self.workers:
                worker.wake_at(self.timeline.now)
