"""Fixtures for tests that start real workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.fault_proxy import FaultProxy, fault_proxy

from .stage import Stage, stage

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.acceptance)
            if "make_scene" in getattr(item, "fixturenames", ()):
                # The first test of such a module starts the workers, and waits for all their tasks.
                item.add_marker(pytest.mark.timeout(300))


@pytest.fixture
def make_stage(
    request: pytest.FixtureRequest,
    sqs: SQSClient,
    sqs_endpoint: str,
    proxy: FaultProxy,
    tmp_path: Path,
) -> Iterator[Callable[..., Stage]]:
    """Yield a function that makes queues, and can start workers on them, for one test.

    It takes the options of ``stage``. The workers call SQS through the fault proxy.
    """
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


@pytest.fixture(scope="module")
def make_scene(
    request: pytest.FixtureRequest,
    sqs: SQSClient,
    sqs_endpoint: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Stage]]:
    """Yield a function like that of ``make_stage``, for all tests of a module together.

    Its workers call SQS through a fault proxy of their own.
    """
    with ExitStack() as stack:

        def make(**options: Any) -> Stage:
            return stack.enter_context(
                stage(
                    module=request.module.__name__,
                    sqs=sqs,
                    endpoint=sqs_endpoint,
                    directory=tmp_path_factory.mktemp("scene"),
                    proxy=stack.enter_context(fault_proxy(sqs_endpoint)),
                    **options,
                )
            )

        yield make
