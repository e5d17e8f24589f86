"""The real SQS, for whoever has an account: ``make conformance SQS_SERVER=aws``.

The tests and their workers speak to a proxy on this machine, with dummy credentials as always; it
alone has those of the account, and signs with them what it forwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import boto3
from botocore.exceptions import ClientError

from .fault_proxy import FaultProxy, fault_proxy

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

__all__ = ["aws"]


@contextmanager
def aws() -> Iterator[str]:
    """Yield an endpoint that leads to SQS. At the end, delete the queues that the tests left.

    Account and region are those that boto3 finds (environment, profile, role).

    Raises:
        RuntimeError: boto3 finds no credentials, or no region.
    """
    session = boto3.Session()
    if session.get_credentials() is None or session.region_name is None:
        raise RuntimeError(
            "SQS_SERVER=aws needs credentials and a region where boto3 finds them, such as"
            " AWS_PROFILE and AWS_REGION"
        )
    sqs = session.client("sqs")
    with fault_proxy(sqs.meta.endpoint_url, sign=True) as proxy:
        proxy.record("CreateQueue", "DeleteQueue")
        try:
            yield proxy.endpoint
        finally:
            _say(f"{sum(count.calls for count in proxy.counts().values())} calls to SQS")
            for url in _left_over(sqs, proxy):
                _say(f"deleting a queue that a test has left: {url}")
                sqs.delete_queue(QueueUrl=url)


def _left_over(sqs: SQSClient, proxy: FaultProxy) -> Iterator[str]:
    deleted = {request["QueueUrl"] for request in proxy.requests("DeleteQueue")}
    for name in {request["QueueName"]: None for request in proxy.requests("CreateQueue")}:
        try:
            url = sqs.get_queue_url(QueueName=name)["QueueUrl"]
        except ClientError:  # it is gone, or was never made
            continue
        if url not in deleted:
            yield url


def _say(line: str) -> None:
    print(f"\n{line}", file=sys.stderr)  # noqa: T201  # beside pytest's own output
