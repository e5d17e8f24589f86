"""Read facts from a Celery app, from SQS and from the app's store.

This module changes no queue and no message. It reads the attributes of queues. To find denied
permissions, it makes two calls with a receipt handle that does not exist. It also calls
SendMessageBatch on the dead-letter queue without a message. To check the store, it adds, reads,
changes and deletes a test record.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

from botocore.exceptions import NoRegionError
from celery.exceptions import ImproperlyConfigured

from ..sqs.calls import Calls
from ..sqs.errors import Failure, Kind
from ..sqs.find_queue import QueueFinder, connection_to_look
from ..sqs.queues import queue_name, sibling_url
from ..sqs.redact import mask
from .facts import AppFacts, ProjectFacts, QueueFacts, TaskFacts

#: A receipt handle that no message ever had, so calls with it affect no message.
_FALSE_HANDLE = "celery-sqs-backoff-doctor-not-a-receipt-handle"

#: Environment variable of Celery. In a Django project, Celery runs Django's system checks before it
#: imports tasks, unless this variable is set.
_SKIP_CHECKS = "CELERY_SKIP_CHECKS"


class NotImported(Exception):
    """A module of tasks cannot be imported. ``__cause__`` is the module's error."""


def load_tasks(app: Any) -> None:
    """Import the modules of an app's tasks, and finalize the app, as a worker does at its start.

    Django's system checks do not run, because one of them may have called this function. Output of
    the modules goes to stderr, because stdout is for the caller's results.

    Raises:
        NotImported: a module raised an exception, or tried to end the process.
        Exception: an option of a task is invalid.
    """
    before = os.environ.get(_SKIP_CHECKS)
    os.environ[_SKIP_CHECKS] = "yes"
    try:
        with redirect_stdout(sys.stderr):
            app.loader.import_default_modules()
    except (Exception, SystemExit) as exc:
        raise NotImported(_reason(exc)) from exc
    finally:
        if before is None:
            del os.environ[_SKIP_CHECKS]
        else:
            os.environ[_SKIP_CHECKS] = before
    app.finalize(auto=True)


def why_not_loaded(exc: BaseException) -> str:
    """Return the text of an error that :func:`load_tasks` raised, with its file and line."""
    return str(exc) if isinstance(exc, NotImported) else _reason(exc)


def _reason(exc: BaseException) -> str:
    lines = [f for f in traceback.extract_tb(exc.__traceback__) if f.name == "<module>"]
    place = f" ({lines[-1].filename}, line {lines[-1].lineno})" if lines else ""
    return f"{type(exc).__name__}: {mask(str(exc))}{place}"


def look(app: Any, *, live: bool = True, are_named: bool = False) -> ProjectFacts:
    """Read the facts of an app.

    Args:
        app: the Celery app. Its tasks must be loaded (:func:`load_tasks`).
        live: whether to ask SQS and the store, too.
        are_named: whether the operator has named the queues to check (``-Q``).

    Raises:
        kombu.exceptions.OperationalError, botocore's errors: SQS cannot be reached.
    """
    facts = facts_of_app(app, live=live)
    if not live:
        return ProjectFacts(app=facts)
    with connection_to_look(app) as connection:
        if (broker := connection.transport.driver_type) != "sqs":
            return ProjectFacts(app=facts, other_broker=broker)
        channel = connection.default_channel
        names = list(app.amqp.queues.consume_from)
        queues, finder = [], QueueFinder(channel, attempts=2)
        for name in names:
            found = finder.find(name)
            if isinstance(found, Failure):
                queues.append(
                    QueueFacts(
                        name=name,
                        url=channel.canonical_queue_name(name),
                        attributes=None,
                        failure=found.code,
                        client_region=channel.region,
                    )
                )
            else:
                queues.append(facts_of_queue(name, found.queue_url, found.on))
    return ProjectFacts(app=facts, queues=tuple(queues), are_all=not are_named)


def read_ignored(app: Any) -> tuple[str, ...]:
    """Return the keys of ``sqs_backoff["ignore_findings"]``, which maps findings to reasons.

    A key is a rule's ID or ``ID:subject``. A key without a reason has no effect.
    """
    settings = app.conf.get("sqs_backoff")
    ignored = settings.get("ignore_findings") if isinstance(settings, Mapping) else None
    if not isinstance(ignored, Mapping):
        return ()
    return tuple(str(what) for what, reason in ignored.items() if str(reason or "").strip())


def facts_of_app(app: Any, *, live: bool = False) -> AppFacts:
    """Read the settings and the tasks of an app. ``live``: also ask its store."""
    conf = app.conf
    if not isinstance(conf.broker_transport_options or {}, Mapping):
        raise ImproperlyConfigured("invalid broker_transport_options: expected a mapping")
    own = conf.get("sqs_backoff") or {}
    return AppFacts(
        tasks=tuple(_tasks(app)),
        has_store=isinstance(own, Mapping) and own.get("store") is not None,
        default_queue=conf.task_default_queue,
        events=bool(conf.worker_send_task_events),
        **_facts_of_store(app, live=live),
    )


def facts_of_queue(
    name: str, url: str, calls_of: Callable[[str], Calls], *, is_consumed: bool = True
) -> QueueFacts:
    """Read a queue, and the dead-letter queue that its redrive policy names.

    Args:
        name: name of the queue in Celery.
        url: URL of the queue on SQS.
        calls_of: returns the object that makes SQS calls on the queue with a given URL.
        is_consumed: whether workers receive from the queue. ``False`` = workers only send to it, so
            check only the permission to send.
    """
    calls = calls_of(url)
    answer = calls.attributes()
    failure = answer if isinstance(answer, Failure) else None
    denied: list[str] = []
    if failure is None or _is_forbidden(failure):
        # Report a denied read only for a consumed queue. A worker does not read its dead-letter
        # queue, so it needs no permission to do so.
        if failure is not None and is_consumed:
            denied.append("sqs:GetQueueAttributes")
        denied += _find_denied(calls, is_consumed)
    queue = QueueFacts(
        name=name,
        url=url,
        attributes=None if isinstance(answer, Failure) else answer,
        failure=None if failure is None else failure.code,
        denied=tuple(denied),
        is_consumed=is_consumed,
    )
    if not is_consumed or queue.dlq_arn is None or queue.dlq_arn == queue.arn:
        return queue
    dlq_url = sibling_url(url, queue.dlq_arn)
    dlq = facts_of_queue(queue_name(dlq_url), dlq_url, calls_of, is_consumed=False)
    return replace(queue, dlq=dlq)


def _find_denied(calls: Calls, is_consumed: bool) -> Iterable[str]:
    """Yield the actions that SQS denies.

    To find them, make calls that have no effect: with a receipt handle that does not exist, or
    without a message to send.
    """
    if not is_consumed:
        if _is_forbidden(calls.send_nothing()):
            yield "sqs:SendMessage"
        return
    for action, results in (
        ("sqs:ChangeMessageVisibility", calls.change_visibility([(_FALSE_HANDLE, 0)])),
        ("sqs:DeleteMessage", calls.delete([_FALSE_HANDLE])),
    ):
        if _is_forbidden(results[0]):
            yield action


def _is_forbidden(failure: Failure | None) -> bool:
    """Return whether a call failed because a permission is missing, not for wrong credentials."""
    return (
        failure is not None
        and failure.kind is Kind.DENIED
        and not failure.newer_credentials_may_help
    )


#: Prefix of this package's modules. No rule checks their tasks: the user cannot change them.
_OWN_TASKS = "celery_sqs_backoff."


def _tasks(app: Any) -> Iterable[TaskFacts]:
    from ..task.base import BackoffTask

    by_beat = _beat_queues(app)
    for name, task in sorted(app.tasks.items()):
        if name.startswith("celery.") or type(task).__module__.startswith(_OWN_TASKS):
            continue
        queue, exchange = _destination(app, task)
        plain = TaskFacts(
            name=name,
            is_covered=False,
            queue=queue,
            also_to=tuple(sorted(by_beat.get(name, ()))),
            exchange=exchange,
            acks_late=bool(task.acks_late),
            autoretries=bool(getattr(task, "autoretry_for", ())),
        )
        if not isinstance(task, BackoffTask):
            yield plain
            continue
        options = task.backoff_options
        yield replace(
            plain,
            is_covered=True,
            acks_late=True,
            backoff=options.backoff,
            retry_for=options.retry_for,
            max_retries=options.max_retries,
            fifo_cap=options.fifo_cap,
            retried_errors=tuple(f"{c.__module__}.{c.__qualname__}" for c in options.retry_on),
            needs_store=task.guard is not None or task.has_workflows,
            wants_dlq=options.on_give_up == "dead-letter",
        )


def _destination(app: Any, task: Any) -> tuple[str | None, str | None]:
    """Return the queue and the exchange to which Celery sends a task if its caller names no queue.

    At least one of the two is ``None``. If the task names no queue and a router of the user raises
    an exception, both are ``None``. A router may raise because it needs the task's arguments.
    """
    try:
        route = app.amqp.router.lookup_route(task.name, (), {}, {}, task)
        if route and not isinstance(route, Mapping):
            route = {"queue": route}
        default = app.conf.task_default_queue
    except Exception:  # noqa: BLE001  # the user's router may raise any exception
        route, default = {}, None
    options = dict(route or {"queue": default})
    for option in ("queue", "exchange", "routing_key"):
        if (own := getattr(task, option, None)) is not None:
            options[option] = own
    queue, exchange, key = (_name(options.get(o)) for o in ("queue", "exchange", "routing_key"))
    known = _queue_of(app, options.get("queue"))
    if queue is None:
        return (None if exchange else default), (exchange if key else None)
    return (queue if known is None else known.name), None


def _queue_of(app: Any, queue: Any) -> Any:
    """Return the app's queue with a name or alias, or ``None`` if the app has no such queue.

    Return a kombu queue unchanged.
    """
    if not isinstance(queue, str):
        return queue
    return app.amqp.queues.aliases.get(queue) or app.amqp.queues.get(queue)


def _name(of: Any) -> str | None:
    """Return the name of a kombu queue or exchange. A text is a name already."""
    name = getattr(of, "name", of)
    return name if isinstance(name, str) else None


def _beat_queues(app: Any) -> Mapping[str, set[str]]:
    """Return the names of the queues in ``beat_schedule``, by the name of the task."""
    found: dict[str, set[str]] = {}
    for entry in (app.conf.beat_schedule or {}).values():
        get = entry.get if isinstance(entry, Mapping) else functools.partial(getattr, entry)
        named = (get("options", None) or {}).get("queue")
        queue = _name(_queue_of(app, named)) or _name(named)
        if queue is not None:
            found.setdefault(get("task", None), set()).add(queue)
    return found


def _facts_of_store(app: Any, *, live: bool) -> dict[str, Any]:
    """Return the facts about the app's store. ``live``: also call each method of the store."""
    from ..store.check import check_by_asking, check_offline, eviction_of, forgery_of
    from ..store.errors import StoreUnavailable

    try:
        check_offline(app)
    except ImproperlyConfigured as exc:
        # A job that runs only migrations may lack a library or a Region that workers have. Without
        # ``live``, such a job may have called this function, so report no fault.
        is_lacking = isinstance(exc.__cause__, ImportError | NoRegionError)
        if is_lacking and not live:
            return {}
        return {"store_failure" if is_lacking else "store_fault": _of_store(exc)}
    if not live:
        return {}
    found: dict[str, Any] = {"store_forgeable": forgery_of(app)}
    try:
        check_by_asking(app)
        found["store_eviction"] = eviction_of(app)
    except ImproperlyConfigured as exc:
        found["store_failure"] = _of_store(exc)
    except StoreUnavailable as exc:
        found["store_failure"] = f"it does not answer, or accepts no writes ({exc})"
    return found


def _of_store(exc: ImproperlyConfigured) -> str:
    return str(exc).removeprefix("sqs_backoff['store']: ")
