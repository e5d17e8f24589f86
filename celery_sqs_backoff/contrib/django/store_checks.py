"""The store's settings as Django system checks: offline always, its table with ``--deploy``.

* ``celery_sqs_backoff.E040``: the store, its database alias or another setting of it is invalid.
* ``celery_sqs_backoff.E041``: the store does not answer, takes no changes, or has no table.
* ``celery_sqs_backoff.W042``: records on a shared store are not signed.
* ``celery_sqs_backoff.W043``: the store's library, or the Region, is missing where this runs.
"""

from __future__ import annotations

from typing import Any

from botocore.exceptions import NoRegionError
from celery.exceptions import ImproperlyConfigured
from django.core import checks  # type: ignore[import-untyped]

from celery_sqs_backoff.store.check import check_by_asking, check_offline, warnings_of
from celery_sqs_backoff.store.errors import StoreUnavailable

from .checks import SERIOUS_WITH_DEPLOY
from .project import project_app


def register() -> None:
    """Register the checks; called once, by the app config."""
    checks.register(check_store, "celery_sqs_backoff")
    checks.register(check_store_answers, "celery_sqs_backoff", deploy=True)


def check_store(app_configs: Any, **_: Any) -> list[Any]:
    """Check the settings of the store. Asks nobody.

    What only this image or job lacks is a warning: ``migrate`` runs the checks there too.
    """
    try:
        app = project_app()
    except ImproperlyConfigured:  # the check of the app says so
        return []
    try:
        check_offline(app)
    except ImproperlyConfigured as exc:
        if isinstance(exc.__cause__, ImportError | NoRegionError):
            hint = SERIOUS_WITH_DEPLOY
            return [checks.Warning(str(exc), hint=hint, id="celery_sqs_backoff.W043")]
        return [checks.Error(str(exc), id="celery_sqs_backoff.E040")]
    return []


def check_store_answers(app_configs: Any, **_: Any) -> list[Any]:
    """Check that the store answers and is migrated, and that its records are signed."""
    try:
        app = project_app()
    except ImproperlyConfigured:
        return []
    if any(found.is_serious() for found in check_store(app_configs)):
        return []
    found = [checks.Warning(w, id="celery_sqs_backoff.W042") for w in warnings_of(app)]
    try:
        check_by_asking(app)
    except ImproperlyConfigured as exc:
        found.append(checks.Error(str(exc), id="celery_sqs_backoff.E041"))
    except StoreUnavailable as exc:
        away = f"sqs_backoff['store']: it does not answer, or takes no changes ({exc})"
        found.append(checks.Error(away, id="celery_sqs_backoff.E041"))
    return found
