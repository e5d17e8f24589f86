"""Report the doctor's findings as Django system checks.

The offline rules always run. Rules that ask SQS or the store run only with ``--deploy``. The ID of
a check is ``celery_sqs_backoff.`` with the doctor's ID, such as ``celery_sqs_backoff.W010``.
"""

from __future__ import annotations

from typing import Any

from celery.exceptions import ImproperlyConfigured
from django.core import checks  # type: ignore[import-untyped]

from celery_sqs_backoff.doctor import Finding, ProjectFacts, Severity, examine
from celery_sqs_backoff.doctor.look import (
    NotImported,
    facts_of_app,
    load_tasks,
    look,
    read_ignored,
    why_not_loaded,
)
from celery_sqs_backoff.sqs.find_queue import why_not

from .project import project_app

#: The hint for a missing module or variable. Workers may have it even if this process does not.
SERIOUS_WITH_DEPLOY = "Workers need it. If they lack it too, check --deploy reports an error."

_KINDS = {
    Severity.ERROR: checks.Error,
    Severity.WARNING: checks.Warning,
    Severity.INFO: checks.Info,
}


def register() -> None:
    """Register the checks. The app config calls this once."""
    checks.register(check_app, "celery_sqs_backoff")
    checks.register(check_deployment, "celery_sqs_backoff", deploy=True)


def check_app(app_configs: Any, **_: Any) -> list[Any]:
    """Check tasks and settings, without a request to SQS or the store.

    A module that cannot be imported is only a warning. ``migrate`` also runs the checks, often
    without the workers' libraries and variables. The module may also need tables that ``migrate``
    has yet to create.
    """
    try:
        app = project_app()
    except ImproperlyConfigured as exc:
        hint = "manage.py's commands of this package need it too."
        return [_warning("W035", f"tasks and Celery settings are not checked: {exc}", hint)]
    try:
        load_tasks(app)
        facts = look(app, live=False)
    except NotImported as exc:
        text = f"the Celery app's tasks cannot be checked: {why_not_loaded(exc)}"
        return [_warning("W032", text, SERIOUS_WITH_DEPLOY)]
    except Exception as exc:  # noqa: BLE001  # an option of a task, or a setting, may raise any
        return [_not_loaded(exc)]
    return [_message(f) for f in examine(facts, ignore=read_ignored(app), live=False)]


def check_deployment(app_configs: Any, **_: Any) -> list[Any]:
    """Check queues, dead-letter queues, permissions and the store, only with ``--deploy``."""
    try:
        app = project_app()
        load_tasks(app)
        offline = {(f.id, f.subject) for f in examine(look(app, live=False), live=False)}
    except NotImported as exc:
        return [_not_loaded(exc)]
    except Exception:  # noqa: BLE001  # ``check_app`` reports the same error
        return []
    could_not = []
    try:
        facts = look(app)
    except Exception as exc:  # noqa: BLE001  # if SQS cannot be reached, check only the store
        facts, could_not = ProjectFacts(app=facts_of_app(app, live=True)), [why_not(exc)]
    if facts.other_broker is not None:
        could_not.append(f"the broker is {facts.other_broker}")
    could_not += [f"queue {queue.name}: {queue.failure}" for queue in facts.unread]
    return [
        *map(_could_not_look, could_not),
        *(
            _message(f)
            for f in examine(facts, ignore=read_ignored(app))
            if (f.id, f.subject) not in offline
        ),
    ]


# These checks are not rules of the doctor, so the doctor does not use their numbers.


def _warning(number: str, text: str, hint: str) -> Any:
    return checks.Warning(text, hint=hint, id=f"celery_sqs_backoff.{number}")


def _could_not_look(why: str) -> Any:
    hint = "Run the check where the workers run, with their credentials."
    return _warning("W030", f"SQS could not be asked ({why})", hint)


def _not_loaded(exc: Exception) -> Any:
    return checks.Error(
        f"the Celery app's tasks or settings cannot be loaded: {why_not_loaded(exc)}",
        hint="A worker would not start either: correct what it names.",
        id="celery_sqs_backoff.E031",
    )


def _message(finding: Finding) -> Any:
    return _KINDS[finding.severity](
        f"{finding.subject}: {finding.evidence}. {finding.consequence}",
        hint="\n".join(filter(None, (finding.fix.aws, finding.fix.text))) or None,
        obj=finding.subject,
        id=f"celery_sqs_backoff.{finding.id}",
    )
