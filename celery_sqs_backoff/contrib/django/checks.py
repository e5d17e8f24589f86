"""Report findings of ``sqs_doctor`` as Django system checks.

The rules that ask SQS or the store run only in ``manage.py sqs_doctor``, and not here. The ID of a
check is ``celery_sqs_backoff.`` with the ID of the rule, such as ``celery_sqs_backoff.W010``.
"""

from __future__ import annotations

from typing import Any

from celery.exceptions import ImproperlyConfigured
from django.core import checks  # type: ignore[import-untyped]

from celery_sqs_backoff.doctor import Finding, Severity, examine
from celery_sqs_backoff.doctor.look import (
    NotImported,
    load_tasks,
    look,
    read_ignored,
    why_not_loaded,
)

from .project import project_app

#: The hint for a missing module or environment variable. This process may lack it although the
#: workers have it.
_WORKERS_NEED_IT = "Workers need it. If they lack it too, they do not start."

_KINDS = {
    Severity.ERROR: checks.Error,
    Severity.WARNING: checks.Warning,
    Severity.INFO: checks.Info,
}


@checks.register("celery_sqs_backoff")  # type: ignore[untyped-decorator]
def check_app(app_configs: Any, **_: Any) -> list[Any]:
    """Check tasks and settings, without a request to SQS or the store.

    A module that cannot be imported is only a warning, because an error would stop ``migrate``.
    ``migrate`` often runs without the workers' libraries and environment variables. The module may
    also need tables that ``migrate`` has not created yet.
    """
    try:
        app = project_app()
    except ImproperlyConfigured as exc:
        hint = "The manage.py commands of this package need the app, too."
        return [_warning("W035", f"tasks and Celery settings are not checked: {exc}", hint)]
    try:
        load_tasks(app)
        facts = look(app, live=False)
    except NotImported as exc:
        text = f"the Celery app's tasks cannot be checked: {why_not_loaded(exc)}"
        return [_warning("W032", text, _WORKERS_NEED_IT)]
    except Exception as exc:  # noqa: BLE001  # a task or a setting may raise any exception
        text = f"the Celery app's tasks or settings cannot be loaded: {why_not_loaded(exc)}"
        hint = "A worker would not start either. Correct the task or setting that the error names."
        return [checks.Error(text, hint=hint, id="celery_sqs_backoff.E031")]
    return [_message(f) for f in examine(facts, ignore=read_ignored(app), live=False)]


# E031, W032 and W035 are not rules of ``sqs_doctor``, which must not use these numbers.


def _warning(number: str, text: str, hint: str) -> Any:
    return checks.Warning(text, hint=hint, id=f"celery_sqs_backoff.{number}")


def _message(finding: Finding) -> Any:
    return _KINDS[finding.severity](
        f"{finding.subject}: {finding.evidence}. {finding.consequence}",
        hint="\n".join(filter(None, (finding.fix.aws, finding.fix.text))) or None,
        obj=finding.subject,
        id=f"celery_sqs_backoff.{finding.id}",
    )
