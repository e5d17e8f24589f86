"""Start SQS servers for tests as child processes on 127.0.0.1, or use the real SQS."""

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

from .aws import announcement, aws
from .listeners import beyond_loopback
from .processes import eventually, free_port, stop

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient


def sqs_client(endpoint: str, **config: Any) -> SQSClient:
    """Return a client with dummy credentials. ``config`` is for ``botocore.config.Config``."""
    session = boto3.Session(
        region_name="us-east-1", aws_access_key_id="testing", aws_secret_access_key="testing"
    )
    return session.client("sqs", endpoint_url=endpoint, config=Config(**config))


def server_name() -> str:
    """Return the name of the server that the tests use. It is ``SQS_SERVER``, or ministack."""
    return os.environ.get("SQS_SERVER", "ministack")


def before_the_first_call() -> str:
    """Return a notice to print before the first call to SQS. For a local server it is empty.

    Raises:
        RuntimeError: ``SQS_SERVER`` names no server, or boto3 cannot use the real SQS.
    """
    if os.environ.get("SQS_ENDPOINT"):
        return ""
    if server_name() not in SERVERS:
        raise RuntimeError(f"SQS_SERVER={server_name()!r}: it must be one of {', '.join(SERVERS)}")
    return announcement() if server_name() == "aws" else ""


@contextmanager
def sqs_server() -> Iterator[str]:
    """Yield the URL of the SQS for the tests. Start a server, unless ``SQS_ENDPOINT`` names one."""
    if endpoint := os.environ.get("SQS_ENDPOINT"):
        yield endpoint
        return
    with SERVERS[server_name()]() as endpoint:
        yield endpoint


@contextmanager
def ministack(*, start_timeout: float = 60.0) -> Iterator[str]:
    """Run ministack, SQS only, and yield its endpoint URL."""
    with tempfile.TemporaryDirectory(prefix="ministack-") as directory:
        port = free_port()
        env = {
            "BIND_HOST": "127.0.0.1",
            "GATEWAY_PORT": str(port),
            "SERVICES": "sqs",
            # Off, because SFTP and MQTT would open ports of their own. ministack 1.4.21 opens the
            # port of MQTT on all addresses of the machine.
            "SFTP_ENABLED": "0",
            "IOT_MTLS_ENABLED": "0",
            "LOG_LEVEL": "WARNING",
            "TMPDIR": directory,  # the server writes its pid file here
        }
        with _running(["ministack"], env, port, Path(directory), start_timeout) as endpoint:
            yield endpoint


@contextmanager
def moto(*, start_timeout: float = 60.0) -> Iterator[str]:
    """Run moto's server, and yield its endpoint URL."""
    with tempfile.TemporaryDirectory(prefix="moto-") as directory:
        port = free_port()
        module = ["moto.server", "--host", "127.0.0.1", "--port", str(port)]
        with _running(module, {}, port, Path(directory), start_timeout) as endpoint:
            yield endpoint


@contextmanager
def localstack(*, start_timeout: float = 60.0) -> Iterator[str]:
    """Run LocalStack in host mode, SQS only, and yield its endpoint URL.

    It uses the web server hypercorn. The default web server ignores ``GATEWAY_LISTEN`` and listens
    on all addresses.
    """
    with tempfile.TemporaryDirectory(prefix="localstack-") as directory:
        port = free_port()
        env = {
            "GATEWAY_SERVER": "hypercorn",
            "GATEWAY_LISTEN": f"127.0.0.1:{port}",
            "LOCALSTACK_HOST": f"127.0.0.1:{port}",
            "LOCALSTACK_VOLUME_DIR": directory,
            "SERVICES": "sqs",
            "DNS_ADDRESS": "0",
            "DISABLE_EVENTS": "1",
            "SKIP_SSL_CERT_DOWNLOAD": "1",
            "SQS_ENDPOINT_STRATEGY": "path",
            "SQS_ENABLE_MESSAGE_RETENTION_PERIOD": "1",
        }
        module = ["localstack.runtime.main"]
        with _running(module, env, port, Path(directory), start_timeout) as endpoint:
            yield endpoint


SERVERS = {"ministack": ministack, "moto": moto, "localstack": localstack, "aws": aws}


@contextmanager
def _running(
    module: list[str], env: dict[str, str], port: int, directory: Path, start_timeout: float
) -> Iterator[str]:
    """Run ``python -m module`` with its arguments during the block, and yield its endpoint URL.

    Raises:
        RuntimeError: the server has ended, or other machines could reach it.
    """
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            env=os.environ | env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    endpoint = f"http://127.0.0.1:{port}"
    try:
        eventually(
            lambda: process.poll() is not None or _answers(endpoint),
            timeout=start_timeout,
            message=lambda: f"{module[0]} did not answer:\n{log.read_text()}",
        )
        if process.poll() is not None:
            raise RuntimeError(f"{module[0]} exited, {process.returncode}:\n{log.read_text()}")
        if reachable := beyond_loopback(process.pid):
            raise RuntimeError(f"{module[0]} listens beyond this machine: {', '.join(reachable)}")
        yield endpoint
    finally:
        stop(process)


def _answers(endpoint: str) -> bool:
    try:
        sqs_client(endpoint, connect_timeout=1, read_timeout=1).list_queues()
    except (BotoCoreError, ClientError):
        return False
    return True
