"""SQS servers for tests, each a child process on a free port of 127.0.0.1."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from .processes import eventually, free_port, stop

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

__all__ = ["ministack", "sqs_client", "sqs_server"]


def sqs_client(endpoint: str, **config: Any) -> SQSClient:
    """A client with dummy credentials; ``config`` as for ``botocore.config.Config``."""
    session = boto3.Session(
        region_name="us-east-1", aws_access_key_id="testing", aws_secret_access_key="testing"
    )
    return session.client("sqs", endpoint_url=endpoint, config=Config(**config))


@contextmanager
def sqs_server() -> Iterator[str]:
    """The endpoint that the tests use: ``SQS_ENDPOINT`` if it is set, else a ministack."""
    if endpoint := os.environ.get("SQS_ENDPOINT"):
        yield endpoint
        return
    with ministack() as endpoint:
        yield endpoint


@contextmanager
def ministack(*, start_timeout: float = 20.0) -> Iterator[str]:
    """Run ministack, SQS only, and yield its endpoint URL."""
    with tempfile.TemporaryDirectory(prefix="ministack-") as directory:
        log = Path(directory) / "log"
        port = free_port()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "ministack"],
                env=os.environ
                | {
                    "BIND_HOST": "127.0.0.1",
                    "GATEWAY_PORT": str(port),
                    "SERVICES": "sqs",
                    "LOG_LEVEL": "WARNING",
                    "TMPDIR": directory,  # its pid file
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        endpoint = f"http://127.0.0.1:{port}"
        try:
            eventually(
                lambda: process.poll() is not None or _answers(endpoint),
                timeout=start_timeout,
                message=lambda: f"ministack did not answer:\n{log.read_text()}",
            )
            if process.poll() is not None:
                raise RuntimeError(
                    f"ministack exited with {process.returncode}:\n{log.read_text()}"
                )
            yield endpoint
        finally:
            stop(process)


def _answers(endpoint: str) -> bool:
    try:
        sqs_client(endpoint, connect_timeout=1, read_timeout=1).list_queues()
    except (BotoCoreError, ClientError):
        return False
    return True
