"""A Celery worker with our parts that the rig drives step by step, in one thread."""

from __future__ import annotations

import math
import os
import pickle
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from time import monotonic
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from billiard.einfo import ExceptionInfo
from celery.concurrency import gevent, prefork, solo, thread
from celery.concurrency.base import BasePool, apply_target
from celery.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.signals import worker_shutting_down
from celery.worker import components, state
from kombu.asynchronous.timer import Timer

from .parts import Parts

if TYPE_CHECKING:
    from .rig import Rig

#: A long poll of SQS lasts this long, unless a message arrives.
_LONG_POLL_SECONDS = 20.0

_POOLS: dict[str, type] = {
    "prefork": prefork.TaskPool,
    "threads": thread.TaskPool,
    "greenlets": gevent.TaskPool,
    "solo": solo.TaskPool,
}


class _Timer(Timer):
    """Celery's timer in virtual time. Celery gives it times of the monotonic clock."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def enter_at(self, entry: Any, eta: Any = None, priority: int = 0, time: Any = None) -> Any:
        seconds = 0.0 if eta is None else eta - monotonic()
        return self.enter_after(max(0.0, seconds), entry)

    def enter_after(self, secs: float, entry: Any, priority: int = 0, time: Any = None) -> Any:
        self._worker.after(secs, lambda: entry.canceled or self.apply_entry(entry))
        return entry

    def call_repeatedly(self, secs: float, fun: Any, *_: Any, **__: Any) -> Any:
        return self.Entry(fun)  # never called: these are heartbeats of Celery's event loop


class _EventLoop:
    """Stands for Celery's event loop. Each turn of the worker calls the waiting callbacks."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.timer = worker.timer
        self._ready: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[[], object], *_: Any) -> Any:
        self._ready.append(callback)
        self._worker.wake_at(self._worker.timeline.now)
        return callback

    def refuse_once(self, exc: Exception) -> None:
        """Raise an exception at the next ``call_soon``."""

        def refuse(*_: Any) -> None:
            del self.call_soon
            raise exc

        self.call_soon = refuse  # type: ignore[method-assign]

    def turn(self) -> bool:
        """Call the waiting callbacks, and return whether there were any."""
        ready, self._ready = self._ready, []
        for callback in ready:
            callback()
        return bool(ready)


def _pool_of(kind: str, worker: Worker) -> type[BasePool]:
    """Return a pool class that looks to Celery like this kind. The rig decides when tasks run."""

    class Pool(_POOLS[kind]):  # type: ignore[misc]
        _pool = None

        def __init__(self, limit: int, **options: Any) -> None:
            BasePool.__init__(self, limit, **options)

        def on_apply(self, target: Any, args: Any, kwargs: Any, **options: Any) -> object:
            worker.runs.append(run := Run(worker, target, args, options))
            worker.rig.on_run(run)
            # Celery's threads pool returns a new object that it does not keep.
            return thread.ApplyResult(Future()) if kind == "threads" else run

        def terminate_job(self, pid: int, signal: Any = None) -> None:
            if kind == "threads":
                raise NotImplementedError  # Celery's threads pool does the same
            for run in worker.runs:
                if run.pid == pid:
                    run.terminate(signal)

        def on_start(self) -> None: ...

        on_stop = on_close = on_terminate = flush = on_start
        num_processes = property(lambda self: self.limit)

    return Pool


class Run:
    """A task that a pool has taken. It waits, then begins, and then ends in one of many ways.

    Attributes:
        worker: the worker whose pool has taken the task.
        task_id: Celery's ID of the task.
        pid: the number that the pool gives for the run's process or greenlet, or None if the task
            has not begun.
        result: the result that the task's process reports.
    """

    _pids = iter(range(100_000_000, 200_000_000))

    def __init__(self, worker: Worker, target: Any, args: Any, options: dict[str, Any]) -> None:
        self.worker = self._worker = worker
        self._target, self._args = target, args
        self._report = SimpleNamespace(**options)
        self.task_id: str = args[1]
        self.pid: int | None = None
        self.result: Any = None

    @property
    def has_begun(self) -> bool:
        return self.pid is not None

    @property
    def sent(self) -> bytes:
        """The bytes that the pool sends to its process."""
        return pickle.dumps(self._args)

    def begin(self) -> Run:
        """Let a process or a thread of the pool begin the task."""
        if not self.has_begun:
            # Greenlets have numbers of their own, too.
            self.pid = os.getpid() if self._worker.has_one_pid else next(self._pids)
            with self._worker.acts():
                try:
                    self._report.accept_callback(self.pid, monotonic())
                except Exception:  # noqa: BLE001
                    if not self._worker.is_prefork:
                        self._leave()  # Celery's threads pool drops the task without a report
        return self

    def finish(self) -> Run:
        """Run the task with Celery's tracer, and report to the worker how it ended."""
        if self.begin() not in self._worker.runs:
            return self  # the worker has refused to begin the task
        app = self._worker.rig.app
        if self._worker.is_prefork:
            args = pickle.loads(pickle.dumps(self._args))
            self.result = self._target(*args, app=app)
            return self._end(self._report.callback, pickle.loads(pickle.dumps(self.result)))

        def report(result: Any) -> None:
            self.result = result
            self._end(self._report.callback, result)

        timeouts = (self._worker.rig.pool_timeout,) if self._worker.rig.pool_timeout else ()
        try:
            apply_target(self._target, self._args, {"app": app}, report, propagate=timeouts)
        except timeouts:
            self.exceed_time_limit()
        return self

    def fail(self, exc: BaseException) -> Run:
        """Let the pool report an exception that the task's process has not reported."""
        self.begin()
        return self._end(self._report.error_callback, _einfo(exc))

    def lose(self) -> Run:
        """Kill the task's process with SIGKILL, as the kernel does when memory is short."""
        return self.fail(WorkerLostError("Worker exited prematurely: signal 9 (SIGKILL)"))

    def exceed_time_limit(self, *, is_soft: bool = False) -> Run:
        """End the task at its hard time limit, or report that its soft limit is over.

        As in Celery, the prefork pool reports a hard limit twice, and other pools once.
        """
        self.begin()
        with self._worker.acts():
            if self._worker.is_prefork and not is_soft:
                self._report.error_callback(_einfo(TimeLimitExceeded(5)))
            if not is_soft:
                return self._end(self._report.timeout_callback, False, 5)
            self._report.timeout_callback(True, 5)
            return self

    def terminate(self, signum: Any = signal.SIGTERM) -> None:
        """Kill the task's process because Celery asks for it. The pool reports the end soon."""
        if self in self._worker.runs:
            self._worker.after(0.0, lambda: self._end_terminated(signum))

    def _end_terminated(self, signum: int) -> None:
        if self not in self._worker.runs:
            return
        if self._worker.is_prefork:
            self._end(self._report.error_callback, _einfo(Terminated(signum)))
        else:  # gevent's pool reports the end of a greenlet in this way
            self._end(self._report.callback, (0, None, None))

    def _end(self, report: Callable[..., object], *args: Any) -> Run:
        with self._worker.acts():
            self._leave()
            try:
                report(*args)
            finally:
                self._worker.end_if_stopped()
        return self

    def _leave(self) -> None:
        self._worker.runs.remove(self)
        self._worker.process_is_free()


def _einfo(exc: BaseException) -> Any:
    try:
        raise exc
    except BaseException:  # noqa: BLE001
        return ExceptionInfo()


class Worker:
    """A worker on the rig. ``Rig.start_worker`` makes it.

    Attributes:
        runs: the tasks that the pool has taken and that have not ended.
        is_alive: false after ``kill``, and when a stop is complete.
        celery: Celery's consumer.
    """

    def __init__(
        self, rig: Rig, name: str, *, queues: Iterable[str], processes: int, pool: str
    ) -> None:
        self.rig, self.timeline, self.sqs = rig, rig.timeline, rig.sqs
        self.name = name
        self.is_alive = True
        self.is_prefork, self.has_one_pid = pool == "prefork", pool in ("threads", "solo")
        self.runs: list[Run] = []
        self.pollers: dict[str, Any] = {}
        self._polls: dict[str, tuple[float, float]] = {}
        self._wakes_at: set[float] = set()
        self._is_stopping = False
        self._suspended_until = -math.inf
        self.celery_state: list[Any] = []
        self.celery_flags: tuple[Any, Any] = None, None
        self.timer = _Timer(self)
        self._loop = _EventLoop(self)
        with (
            self.acts(),
            mock.patch.multiple(
                components,
                _Timer=lambda **_: self.timer,
                get_event_loop=lambda: self._loop,
            ),
            mock.patch.object(components.Hub, "_patch_thread_primitives"),
        ):
            self._controller = rig.app.WorkController(
                hostname=name,
                pool_cls=_pool_of(pool, self),
                concurrency=processes,
                queues=list(queues),
                use_eventloop=True,
                without_gossip=True,
                without_mingle=True,
                without_heartbeat=True,
                task_events=True,
            )
            self.celery = self._controller.consumer
            self._parts = Parts(self.celery, self)
            self._parts.hear(lambda event: rig.events.append(event))
            self.celery.loop = self._consume
            self.celery.blueprint.start(self.celery)

    def _consume(self, consumer: Any, connection: Any, task_consumer: Any, *_: Any) -> None:
        task_consumer.on_message = consumer.create_task_handler()
        task_consumer.consume()
        self.wake_at(self.timeline.now)

    @contextmanager
    def acts(self) -> Iterator[None]:
        """During the block, let Celery's global state be that of this worker."""
        before = self.rig.let_act(self)
        try:
            yield
        finally:
            self.rig.let_act(before)

    # Time

    def at(self, time: float, do: Callable[[], object]) -> None:
        """Do something at a time, unless the worker is dead by then."""

        def do_alive() -> None:
            if self.is_alive and self.is_suspended:
                self.timeline.at(self._suspended_until, do_alive)
            elif self.is_alive:
                with self.acts():
                    do()

        self.timeline.at(time, do_alive)

    def after(self, seconds: float, do: Callable[[], object]) -> None:
        self.at(self.timeline.now + seconds, do)

    def wake_at(self, at: float) -> None:
        """Let the worker take a turn at a time, or now if the time is past."""
        at = max(at, self.timeline.now)
        if at != math.inf and at not in self._wakes_at:
            self._wakes_at.add(at)
            self.at(at, self._turn)

    def _turn(self) -> None:
        """Make the callbacks of Celery's loop, the calls to SQS and the receives that are due."""
        now = self.timeline.now
        self._wakes_at = {at for at in self._wakes_at if at > now}
        is_busy = True
        while is_busy and self.is_alive:
            is_busy = self._loop.turn()
            while (call := self._parts.next_call()) is not None:
                is_busy = True
                self._send_off(call)
            for url in self.pollers:
                is_busy = self._poll(url) or is_busy
        self.wake_at(self._parts.next_at())

    def _send_off(self, call: Any) -> None:
        """Let a call take ``rig.latency`` to SQS and back."""

        def arrive() -> None:
            results = self._parts.carry_out(call)
            if self.rig.latency:
                self.after(self.rig.latency / 2, lambda: self._parts.enter(call, results))
            else:
                self._parts.enter(call, results)

        if self.rig.latency:
            # A call that is under way reaches SQS even if its worker is killed.
            self.timeline.at(self.timeline.now + self.rig.latency / 2, arrive)
        else:
            arrive()

    def _poll(self, url: str) -> bool:
        """Receive if a long poll would now end. Return whether it has brought a message."""
        poller, now = self.pollers[url], self.timeline.now
        paused_until, poll_ends_at = self._polls.get(url, (now, now))
        visible_at = self.sqs.next_visible_at(url)
        if poller.is_stopped:
            return False
        if now < paused_until:
            self.wake_at(paused_until)
            return False
        if visible_at <= now or poll_ends_at <= now:
            brought, pause = poller.poll()
            if brought:
                return True
            paused_until, poll_ends_at = now + pause, now + (pause or _LONG_POLL_SECONDS)
            self._polls[url] = paused_until, poll_ends_at
        # If a message is visible now, the worker has no room for it. An event that makes room will
        # wake the worker.
        self.wake_at(min(poll_ends_at, visible_at if visible_at > now else poll_ends_at))
        return False

    def flush(self, timeout_seconds: float) -> None:
        """Wait until SQS has confirmed all settlements, at most for this time."""
        self.timeline.pass_time(timeout_seconds, until=lambda: not self._parts.unconfirmed)

    # What a test does

    def kill(self) -> None:
        """End the worker and its processes, as SIGKILL does."""
        self.is_alive = False
        self.runs.clear()
        self._parts.forget()

    def suspend(self, seconds: float) -> None:
        """Suspend the worker's machine for some seconds. Calls that are under way reach SQS."""
        self._suspended_until = self.timeline.now + seconds

    @property
    def is_suspended(self) -> bool:
        return self.timeline.now < self._suspended_until

    def freeze(self, seconds: float) -> None:
        """Suspend the worker, as SIGSTOP does, and let this time pass.

        When it goes on, the test's next action comes before the worker's. So a run can begin, for
        example, before the worker has noticed the pause.
        """
        self.suspend(seconds + 0.001)
        self.timeline.pass_time(seconds)

    def break_provider(self, exc: Exception) -> None:
        """Let the worker's code for providers raise an exception when a run ends."""
        self._parts.break_provider(exc)

    def fail_loop(self, exc: Exception) -> None:
        """Let Celery's event loop refuse its next callback, as a loop does that has ended."""
        self._loop.refuse_once(exc)

    def cancel_consumer(self, queue: str) -> None:
        """Stop the worker's consumer of a queue, as ``app.control.cancel_consumer`` does."""
        with self.acts():
            self.celery.cancel_task_queue(queue)

    def signal_stop(self) -> None:
        """Send SIGTERM. Celery notes the signal, but does not stop before ``stop`` is called."""
        self._begin_to_stop("should_stop", 0)

    def break_loss_notice(self, exc: Exception) -> None:
        """Let the code fail that tells the running tasks that their message is lost."""
        self._parts.break_loss_notice(exc)

    def stop(self) -> None:
        """Send SIGTERM. Running tasks may finish, and the worker gives waiting messages back."""
        if not self._is_stopping:
            self.signal_stop()
        with self.acts():
            self.celery.stop()
        self.end_if_stopped()

    def stop_cold(self) -> None:
        """Send SIGQUIT. The worker ends its running tasks."""
        self._begin_to_stop("should_terminate", True)
        with self.acts():
            self.celery.cancel_active_requests()
            self.celery.stop()
        self.timeline.pass_time(0.0)
        self.runs.clear()
        self.end_if_stopped()

    def lose_connection(self) -> None:
        """Let Celery lose its connection to the broker, and connect again."""
        with self.acts():
            self.celery.on_connection_error_after_connected(OSError("lost"))
            self.celery.on_close()
            self.celery.blueprint.restart(self.celery)
            self.celery.blueprint.start(self.celery)

    def revoke(self, task_id: str, *, terminate: bool = False) -> None:
        """Revoke a task, as ``app.control.revoke`` does."""
        with self.acts():
            state.revoked.add(task_id)
            request = state.requests.get(task_id)
            if terminate and request is not None:
                request.terminate(self.celery.pool, signal.SIGTERM)
        self.timeline.pass_time(0.0)

    def _begin_to_stop(self, flag: str, value: int) -> None:
        self._is_stopping = True
        with self.acts():
            worker_shutting_down.send(sender=self.name, sig="SIGTERM", how="Warm", exitcode=0)
            setattr(state, flag, value)  # an exit code, or true

    def end_if_stopped(self) -> None:
        """Complete the shutdown if the worker is stopping and its last task has ended."""
        if self._is_stopping and self.is_alive and not self.runs:
            with self.acts():
                self._parts.shut_down()
            self.is_alive = False

    def process_is_free(self) -> None:
        """Tell the worker that a process is free for the next task."""
        self._controller._quick_release()
        self.wake_at(self.timeline.now)

    # What a test checks

    @property
    def held(self) -> set[str]:
        """The SQS message IDs of the messages that the worker holds."""
        return self._parts.held if self.is_alive else set()

    @property
    def requests(self) -> list[Any]:
        """Celery's requests of tasks that have not ended, as ``inspect active`` shows them."""
        with self.acts():
            return [*state.requests.values(), *state.active_requests]

    @property
    def places_taken(self) -> int:
        """The number of places of the prefetch window that are taken."""
        return self._parts.places_taken


#: Celery keeps this state of a worker in global variables. ``scheduled_requests`` is new in 5.7.
_STATE = (
    state.requests,
    state.reserved_requests,
    state.active_requests,
    getattr(state, "scheduled_requests", set()),
    state.revoked,
    state.successful_requests,
)


def swap_state(before: Worker | None, after: Worker | None) -> None:
    """Save Celery's global state for one worker, and load that of another worker."""
    if before is not None:
        before.celery_state = [dict(state.requests), *(list(each) for each in _STATE[1:])]
        before.celery_flags = state.should_stop, state.should_terminate
    state.reset_state()
    state.should_stop, state.should_terminate = after.celery_flags if after else (None, None)
    for each, saved in zip(_STATE, after.celery_state if after else (), strict=False):
        each.update(saved)
