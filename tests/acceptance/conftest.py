"""Fixtures of the tests with real workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

from tests.support.fault_proxy import FaultProxy

from .stage import Stage, stage

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient


REDIS_TEST_DB = 11


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.acceptance)


@pytest.fixture
def redis_vhost() -> Iterator[str]:
    """Broker URL of a Redis database for this test alone; it is emptied before and after."""
    database = redis.Redis(db=REDIS_TEST_DB)
    database.flushdb()
    yield f"redis://127.0.0.1:6379/{REDIS_TEST_DB}"
    database.flushdb()


@pytest.fixture
def make_stage(
    request: pytest.FixtureRequest,
    sqs: SQSClient,
    sqs_endpoint: str,
    proxy: FaultProxy,
    tmp_path: Path,
) -> Iterator[Callable[..., Stage]]:
    """Make the stage of a test, its workers behind the fault proxy; options of ``stage``."""
    with ExitStack() as stack:

        def make(**options: Any) -> Stage:
            return stack.enter_context(
                stage(
                    module=request.module.__name__,
                    sqs=sqs,
                    endpoint=sqs_endpoint,
                    directory=tmp_path,
                    proxy=proxy,
                    **options,
                )
            )

        yield make
