"""What the app says of its tasks' providers: which there are, and at which rate they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from celery.exceptions import ImproperlyConfigured
from celery.utils.log import get_logger

from ..provider.fleet import FleetSlots
from ..provider.rate import HEADROOM
from ..provider.settings import Provider
from ..store.settings import is_store_shared, vault_of
from ..store.vault import Vault
from ..text import printable

logger = get_logger(__name__)


def provider_of(task: Any) -> Provider | None:
    """Return a task's provider; ``None`` = it has none."""
    provider = getattr(getattr(task, "backoff_options", None), "provider", None)
    return Provider(provider) if isinstance(provider, str) else provider


def shares_a_store(app: Any) -> bool:
    """Return whether the app names a store that other workers can reach."""
    return is_store_shared(app)


def fleet_of(app: Any, *, worker: str) -> Callable[[tuple[str, ...], float], FleetSlots | None]:
    """Return what makes, of a provider's name and rate, the place where its slots are shared."""

    def make(name: tuple[str, ...], rate: float) -> FleetSlots | None:
        vault = _vault(app)
        if vault is None:
            return None
        return FleetSlots(vault, name, rate=rate * HEADROOM, worker=worker)

    return make


def _vault(app: Any) -> Vault | None:
    """The app's records, if other workers can reach them."""
    if not shares_a_store(app):
        return None
    try:
        return vault_of(app)
    except ImproperlyConfigured:  # said at start
        return None


def introduce(app: Any, tasks: Iterable[Any]) -> None:
    """Say which rates the workers do not share."""
    providers = {provider for task in tasks if (provider := provider_of(task)) is not None}
    for provider in sorted(providers, key=lambda each: each.name):
        if provider.rate is None or shares_a_store(app):
            continue
        logger.warning(
            "sqs_backoff.rate_per_worker: %s: each worker makes up to %g calls a second,"
            " because the app names no store for a rate that all share",
            printable(provider.name),
            provider.rate,
        )
