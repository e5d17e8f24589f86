"""Parametrize a test by a table of named cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest


def cases(names: str, rows: Mapping[str, tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Run a test for each row: ``@cases("given expected", {"nothing": (0, None)})``."""
    values = [pytest.param(*row, id=name) for name, row in rows.items()]
    return pytest.mark.parametrize(names.split(), values)
