"""All rules, by number. An id is never used again, also when its rule is gone."""

from __future__ import annotations

from ..finding import Rule
from . import access, dead_letters, queues, retries, settings

__all__ = ["RULES"]

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (*queues.RULES, *dead_letters.RULES, *retries.RULES, *settings.RULES, *access.RULES),
        key=lambda rule: rule.id[1:],
    )
)
