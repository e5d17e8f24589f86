"""Whether a failed call may have reached SQS. Sockets that misbehave cause botocore's errors."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import boto3
import pytest
import trustme
from botocore.config import Config

from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.sqs.errors import Failure, Kind, advice


@contextmanager
def serving(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """Run a server that calls ``behave`` with its first connection, and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                behave(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"https://127.0.0.1:{server.getsockname()[1]}"
        thread.join(20)


def failure(url: str, ca: str | bool = False) -> Failure:
    """Return the failure of a SendMessageBatch to this URL."""
    client: Any = boto3.client(
        "sqs",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="x",
        verify=ca,
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=2),
    )
    (failure,) = Calls(client, f"{url}/1/q").send([{"MessageBody": "b"}])
    assert failure is not None
    return failure


def no_tls(connection: socket.socket) -> None:
    connection.recv(4_096)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def hangs_up(connection: socket.socket) -> None:
    connection.recv(4_096)


def alert(connection: socket.socket) -> None:
    """Answer with TLS 1.2's alert handshake_failure: no cipher in common."""
    connection.recv(4_096)
    connection.sendall(bytes([21, 3, 3, 0, 2, 2, 40]))


@pytest.mark.parametrize("behave", [no_tls, hangs_up, alert], ids=lambda b: b.__name__)
def test_failed_handshake(behave):
    """If the TLS handshake of a call fails, the call was not sent and may be repeated."""
    with serving(behave) as url:
        found = failure(url)
    assert found.kind is Kind.UNREACHABLE, found
    assert found.is_transient
    assert not found.may_have_been_done


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"<html>", b"[]", b"null", b"7", b"\xff\xfe", b"[" * 50_000),
        *(b'{"Successful":5}', b'{"Successful":[{}]}', b'{"Failed":[5]}', b'{"Failed":{"a":1}}'),
    ],
    ids=lambda body: repr(body[:16]),
)
def test_garbled_response(body):
    """After a garbled response, SQS may or may not have carried out the call.

    A proxy may have garbled the response of SQS.
    """

    def behave(connection):
        connection.recv(65_536)
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
        )

    with serving(behave) as url:
        found = failure(url.replace("https", "http"))
    assert found.kind is Kind.IN_DOUBT, found


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    ca, path = trustme.CA(), tmp_path_factory.mktemp("ca") / "ca.pem"
    ca.cert_pem.write_to_path(str(path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    return context, str(path)


def test_untrusted_certificate(authority):
    """If the server's certificate is not trusted, the call was not sent."""
    context, _ = authority

    def behave(connection):
        with suppress(OSError):
            context.wrap_socket(connection, server_side=True).recv(1)

    with serving(behave) as url:
        assert failure(url, ca=True).kind is Kind.UNREACHABLE


def test_tls_breaks_after_request(authority):
    """After a TLS error that comes after the request, SQS may have carried out the call.

    The error is of the same class as one in the handshake.
    """
    context, ca = authority
    seen = []

    def behave(connection):
        secure = context.wrap_socket(connection, server_side=True)
        seen.append(secure.recv(65_536))
        raw = socket.socket(fileno=secure.detach())
        raw.sendall(b"\x17\x03\x03\x00\x20" + b"no record of this key, surely!!!")
        raw.close()

    with serving(behave) as url:
        found = failure(url, ca)
    assert b"SendMessageBatch" in seen[0]
    assert found.kind is Kind.IN_DOUBT, found
    assert found.may_have_been_done


@pytest.mark.parametrize(
    ("shape", "code", "kind"),
    [
        ("KmsDisabled", "KMS.DisabledException", Kind.DENIED),
        ("KmsInvalidKeyUsage", "KMS.InvalidKeyUsageException", Kind.DENIED),
        ("KmsInvalidState", "KMS.InvalidStateException", Kind.DENIED),
        ("KmsNotFound", "KMS.NotFoundException", Kind.DENIED),
        ("KmsAccessDenied", "KMS.AccessDeniedException", Kind.DENIED),
        ("KmsOptInRequired", "KMS.OptInRequired", Kind.DENIED),
        ("KmsThrottled", "KMS.ThrottlingException", Kind.THROTTLED),
    ],
)
def test_legacy_error_code(shape, code, kind):
    """SQS's answer has two codes for an error. Each is classified by the one in the header.

    The header has the code of SQS's older protocol. botocore reports this code.
    """
    body = f'{{"__type":"com.amazonaws.sqs#{shape}","message":"m"}}'.encode()
    head = f"HTTP/1.1 400 Bad Request\r\nx-amzn-query-error: {code};Sender\r\n"

    def behave(connection):
        connection.recv(65_536)
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    with serving(behave) as url:
        found = failure(url.replace("https", "http"))
    assert (found.code, found.kind) == (code.rpartition(".")[2], kind)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("NoCredentialsError", "AWS_PROFILE"),
        ("NoRegionError", "AWS_DEFAULT_REGION"),
        ("EndpointConnectionError", "Check the network"),
        ("ReadTimeoutError", "Try again"),
        ("ExpiredToken", "Renew the credentials"),
        ("CredentialRetrievalError", "Renew the credentials"),
        ("CredentialsNotRenewed (AccessDenied)", "source of the credentials"),
        ("AccessDenied (ListQueues)", "Allow the call"),
        ("QueueDoesNotExist", "queue's name"),
        ("NotInPredefinedQueues", "predefined_queues"),
        ("SomethingNew", "broker_transport_options"),
    ],
)
def test_advice(code, words):
    """For each error code, ``advice`` returns a text that says what to do about it."""
    assert words in advice(code)
