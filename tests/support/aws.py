"""Test against the real SQS, with your own account: ``make conformance SQS_SERVER=aws``.

The tests and their workers call a proxy on this machine, with the same dummy credentials as for
local servers. Only the proxy has the credentials of the account. It signs the requests that it
forwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from .fault_proxy import fault_proxy
from .processes import eventually
from .queue_names import QUEUE_NAME_PREFIX

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

#: The access key with which the tests sign requests to local servers.
_DUMMY = "testing"

#: How long the clean-up waits. SQS says that it may take 60 seconds to delete a queue.
_DELETION_SECONDS = 90.0


def announcement() -> str:
    """Return a notice for the owner of the account before the first call.

    Raises:
        RuntimeError: boto3 finds no credentials or no region, or it finds the dummy credentials.
    """
    session = _account()
    return (
        f"These tests speak to the real SQS in {session.region_name}. All of them together make"
        f" about 13,000 calls, which cost about a cent.\n"
        f"The names of their queues begin with {QUEUE_NAME_PREFIX}. They are deleted at the end."
    )


@contextmanager
def aws(*, deletion_seconds: float = _DELETION_SECONDS) -> Iterator[str]:
    """Yield the URL of a proxy to SQS. At the end, delete the queues of this run.

    boto3 finds the account and the region in the environment, a profile or a role.

    Raises:
        RuntimeError: for the reasons of :func:`announcement`. At the end, if SQS has not deleted
            all queues of this run within ``deletion_seconds``.
    """
    sqs = _account().client("sqs")
    with fault_proxy(sqs.meta.endpoint_url, sign=True) as proxy:
        try:
            yield proxy.endpoint
        finally:
            calls = sum(count.calls for count in proxy.counts().values())
            print(f"\n{calls} calls to SQS", file=sys.stderr)  # noqa: T201  # in pytest's own output
            _delete_queues(sqs, deletion_seconds)


def _account() -> boto3.Session:
    try:
        session = boto3.Session()
        credentials = session.get_credentials()
    except BotoCoreError as exc:  # for example, the profile does not exist
        raise RuntimeError(f"SQS_SERVER=aws: {exc}") from exc
    if credentials is None or session.region_name is None:
        raise RuntimeError(
            "SQS_SERVER=aws needs credentials and a region where boto3 finds them, such as"
            " AWS_PROFILE and AWS_REGION"
        )
    if credentials.access_key == _DUMMY:
        raise RuntimeError(
            f"SQS_SERVER=aws: the access key that boto3 finds is {_DUMMY!r}, which is for"
            " local servers; it comes from AWS_ACCESS_KEY_ID or a profile"
        )
    return session


def _delete_queues(sqs: SQSClient, deletion_seconds: float) -> None:
    def left() -> list[str]:
        pages = sqs.get_paginator("list_queues").paginate(
            QueueNamePrefix=QUEUE_NAME_PREFIX, PaginationConfig={"PageSize": 1_000}
        )
        return [url for page in pages for url in page.get("QueueUrls", [])]

    def all_gone() -> bool:
        for url in left():
            # SQS may just have deleted the queue. If another error is the cause, the queue is left,
            # and the message below names it.
            with suppress(ClientError):
                sqs.delete_queue(QueueUrl=url)
        return not left()

    try:
        eventually(
            all_gone, timeout=deletion_seconds, interval=5, message=lambda: ", ".join(left())
        )
    except (AssertionError, BotoCoreError, ClientError) as exc:
        raise RuntimeError(
            f"queues of these tests may be left; their names begin with {QUEUE_NAME_PREFIX}: {exc}"
        ) from exc
