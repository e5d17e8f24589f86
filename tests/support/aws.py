"""The real SQS, with your own account. ``make conformance SQS_SERVER=aws`` uses it.

The tests and their workers speak to a proxy on this machine, with dummy credentials as always; it
alone has the account's, and signs the forwarded requests with them.
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

#: With which the tests sign for local servers.
_DUMMY = "testing"

#: SQS says that a queue may be there for 60 seconds after it was deleted.
_DELETION_SECONDS = 90.0


def announcement() -> str:
    """Return a notice for the owner of the account before the first call.

    Raises:
        RuntimeError: boto3 finds no credentials, no region, or the dummy ones of local servers.
    """
    session = _account()
    return (
        f"These tests speak to the real SQS in {session.region_name}. All of them together make"
        f" about 13,000 calls, which cost about a cent.\n"
        f"Their queues are called {QUEUE_NAME_PREFIX}... and are deleted at the end."
    )


@contextmanager
def aws(*, deletion_seconds: float = _DELETION_SECONDS) -> Iterator[str]:
    """Yield an endpoint that leads to SQS. At the end, delete the queues of this run.

    boto3 finds account and region (environment, profile, role).

    Raises:
        RuntimeError: as :func:`announcement`; and at the end, when a queue of this run is still
            there after ``deletion_seconds``.
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
    except BotoCoreError as exc:  # a profile that is not there, for one
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
            with suppress(ClientError):  # it has just been deleted; or it is named below
                sqs.delete_queue(QueueUrl=url)
        return not left()

    try:
        eventually(
            all_gone, timeout=deletion_seconds, interval=5, message=lambda: ", ".join(left())
        )
    except (AssertionError, BotoCoreError, ClientError) as exc:
        raise RuntimeError(
            f"queues of these tests may be left, {QUEUE_NAME_PREFIX}...: {exc}"
        ) from exc
