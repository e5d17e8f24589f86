"""What is checked and settled when a task is bound to its app."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from types import MethodType
from typing import Any, Final
from weakref import WeakKeyDictionary

from celery import Task
from celery.exceptions import ImproperlyConfigured
from celery.utils.imports import symbol_by_name

from ..provider.tenant import check_key
from ..retry.options import InvalidOption

logger = logging.getLogger(__name__)

REQUEST: Final = "celery_sqs_backoff.worker.request:BackoffRequest"

#: Settings of Celery's by which a message would go round the task's budgets, and what they are
#: for our tasks: the message is settled by ``retry.decision`` alone.
_OVERRULED: Final[Mapping[str, bool]] = {
    "reject_on_worker_lost": False,
    "retry_on_worker_lost": False,
    "acks_on_failure_or_timeout": True,
    "acks_on_failure": True,
    "acks_on_timeout": True,
}

_overruled_in: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def name_of(cls: Any) -> str:
    """Name a task that is being bound; Celery gives the name of a class without one to its task."""
    return str(cls.name or cls.__qualname__)


def is_celerys_own(name: str) -> bool:
    """Whether a task is one of Celery's built-in ones, such as ``celery.chord_unlock``."""
    return name.startswith("celery.")


def keep_celerys_behaviour(cls: Any, app: Any) -> None:
    """Undo what our base class has set: with ``task_cls`` Celery's own tasks inherit from it too.

    They rely on Celery's ways; ``chord_unlock`` polls by retrying itself, and each retry that keeps
    its message would use up one of the queue's receives.
    """
    cls.Request, cls.Strategy = Task.Request, Task.Strategy
    cls.acks_late = app.conf.task_acks_late
    if "max_retries" not in vars(cls):
        cls.max_retries = Task.max_retries


def overrule_settings(cls: Any, app: Any) -> None:
    """Overrule Celery's settings for lost processes and time limits, and log it once per app."""
    if not _may_be_sqs(app):
        return
    for name, value in _OVERRULED.items():
        given = getattr(cls, name, None)
        if given is None or bool(given) is value:
            continue
        setattr(cls, name, value)
        seen = _overruled_in.setdefault(app, set())
        if name not in seen:
            seen.add(name)
            logger.warning(
                "sqs_backoff.setting_ignored: %s=%r (task %s and maybe others): a lost process or a"
                " hard time limit is retried within crash_budget, max_retries and retry_for",
                name,
                given,
                name_of(cls),
            )


def check_definition(cls: Any, app: Any) -> None:
    """Refuse what cannot work together in a task.

    Raises:
        ImproperlyConfigured: its ``Request`` class would settle messages in Celery's way.
        InvalidOption: its provider's ``key`` names no argument of it.
    """
    _check_provider_key(cls)
    _check_request_class(cls, app)


def _check_request_class(cls: Any, app: Any) -> None:
    """Refuse a ``Request`` class that would settle messages in Celery's way.

    Raises:
        ImproperlyConfigured: it is not a subclass of ours, or cannot be imported.
    """
    given = cls.Request
    if given == REQUEST or not _may_be_sqs(app):
        return
    try:
        request_class = symbol_by_name(given)
    except (ImportError, AttributeError) as exc:
        raise ImproperlyConfigured(f"Request={given!r} cannot be imported: {exc}") from exc
    names = [f"{c.__module__}:{c.__qualname__}" for c in getattr(request_class, "__mro__", ())]
    if REQUEST not in names:
        raise ImproperlyConfigured(
            f"invalid Request {given!r}: expected a subclass of {REQUEST.replace(':', '.')}; any"
            " other class would delete the messages of failed tasks"
        )


def _check_provider_key(cls: Any) -> None:
    """Refuse a provider whose ``key`` names no argument of the task: all calls would share a gate.

    Not an app-wide one, which may be meant for other tasks.
    """
    key = getattr(cls.provider, "key", None)
    if key is None:
        return
    run = inspect.getattr_static(cls, "run")
    is_bound = isinstance(run, staticmethod | classmethod)
    function = cls.run if is_bound else MethodType(run, cls)
    try:
        check_key(key, function)
    except ValueError as exc:
        raise InvalidOption(f"invalid provider: {exc}", "provider") from exc


def setting_name(app: Any) -> str:
    """Return the name under which a project sets our app-wide options."""
    namespace = getattr(app, "namespace", None) or getattr(app, "_config_namespace", None)
    return f"{namespace}_SQS_BACKOFF" if namespace else "sqs_backoff"


def _may_be_sqs(app: Any) -> bool:
    """Whether the broker is SQS, or not known yet."""
    url = app.conf.broker_read_url or app.conf.broker_url or ""
    first = url[0] if isinstance(url, list | tuple) and url else url
    return not first or str(first).startswith("sqs")
