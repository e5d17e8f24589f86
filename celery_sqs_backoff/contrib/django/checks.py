"""Report the doctor's findings as Django system checks.

The offline rules always run, and all others only with ``--deploy``.

Ids are ``celery_sqs_backoff.`` and the doctor's, such as ``celery_sqs_backoff.W010``.
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

#: The hint for a missing module or variable. Perhaps only the image or job of the check lacks it.
SERIOUS_WITH_DEPLOY = "Where workers run it must not be so; check --deploy makes it an error."

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

    A module that cannot be imported is only a warning. ``migrate`` runs the checks too, often
    without the workers' libraries and variables, and the module may need tables that are missing
    before it.
    """
    try:
        app = project_app()
    except ImproperlyConfigured as exc:
        hint = "manage.py's commands of this package need it too."
        return [_warning("W035", f"no task and no setting of Celery's is checked: {exc}", hint)]
    try:
        load_tasks(app)
        facts = look(app, live=False)
    except NotImported as exc:
        text = f"the Celery app's tasks cannot be looked at: {why_not_loaded(exc)}"
        return [_warning("W032", text, SERIOUS_WITH_DEPLOY)]
    except Exception as exc:  # noqa: BLE001  # of an option of a task, or of a setting
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
    except Exception:  # noqa: BLE001  # check_app reports it
        return []
    could_not = []
    try:
        facts = look(app)
    except Exception as exc:  # noqa: BLE001  # without SQS, look at the store alone
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


# The doctor has no rules with these numbers.


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
