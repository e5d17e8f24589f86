"""The boto3 clients that a worker makes for its queues, and how it renews their credentials.

A queue has two clients. One polls for messages. The other settles them: it deletes a message,
hides it, or keeps it hidden.
"""

from __future__ import annotations

import contextlib
import threading
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.credentials import DeferredRefreshableCredentials
from botocore.exceptions import ClientError, ConnectTimeoutError, ReadTimeoutError
from kombu import Connection
from kombu.transport.SQS import Channel

from celery_sqs_backoff import threads
from celery_sqs_backoff.sqs import clients as clients_module
from celery_sqs_backoff.sqs.clients import Clients
from celery_sqs_backoff.sqs.errors import CredentialsNotRenewed, Failure, Kind
from celery_sqs_backoff.sqs.queues import read_queue
from tests.support.processes import eventually

BASE = "http://127.0.0.1:9/0"


def channel_of(queues: dict[str, dict[str, Any]], **options: Any) -> Any:
    """Return a kombu channel. It makes no call to SQS, because all its queues are predefined."""
    predefined = {name: {"url": f"{BASE}/{name}", **q} for name, q in queues.items()}
    options = {"region": "us-east-1", "is_secure": False, "predefined_queues": predefined} | options
    return Connection("sqs://key:secret@127.0.0.1:9//", transport_options=options).channel()


def make_clients(channel: Any, **options: Any) -> Clients:
    clients = Clients(**options)
    clients.attach(channel)
    return clients


def client_of(clients: Clients, url: str) -> Any:
    """Return the client that settles the messages of a queue."""
    return clients.settling(url)._client()


def access_key(client: Any) -> str:
    return str(client._request_signer._credentials.get_frozen_credentials().access_key)


@pytest.mark.hazard("H18")
def test_settling_client():
    """The client that settles messages has the account of the given client, but short timeouts."""
    session = boto3.Session(
        aws_access_key_id="a", aws_secret_access_key="b", region_name="eu-north-1"
    )
    client = session.client("sqs", endpoint_url="http://127.0.0.1:9")
    copy = clients_module._copy(client, clients_module._SETTLING, 15)
    assert copy.meta.region_name == "eu-north-1"
    assert copy.meta.endpoint_url == "http://127.0.0.1:9"
    assert copy._request_signer._credentials is client._request_signer._credentials
    assert copy.meta.config.read_timeout <= 10
    assert copy.meta.config.retries["total_max_attempts"] == 1


class Drip(BaseHTTPRequestHandler):
    """A server that sends a response for 10 seconds, one byte at a time without a long pause."""

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(1_000):
                self.wfile.write(b" ")
                if self.server.is_over.wait(0.01):
                    break

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def dripping():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Drip)
    server.is_over = threading.Event()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.is_over.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("kind", ["polling", "settling"])
def test_dripping_response(monkeypatch, dripping, kind):
    """A call times out even if its response keeps arriving one byte at a time.

    For each queue the worker makes one call at a time that keeps messages hidden. If this call
    hung, the messages of running tasks would be received again.
    """
    monkeypatch.setattr(clients_module, f"_{kind.upper()}_SECONDS", 0.1)
    options = {"region": "us-east-1", "is_secure": False}
    url = f"http://{dripping}/0/q"
    options["predefined_queues"] = {"q": {"url": url}}
    channel = Connection(f"sqs://key:secret@{dripping}//", transport_options=options).channel()
    client = getattr(make_clients(channel)._pair(url), kind)
    with pytest.raises(ReadTimeoutError):
        client.receive_message(QueueUrl=url)


def test_no_thread_left(monkeypatch):
    """If the system allows no further thread, a call is made in the calling thread.

    Then only botocore's timeouts end the call, but the worker can still settle messages.
    """
    monkeypatch.setattr(clients_module, "call_in_time", lambda call, seconds: None)
    session = SimpleNamespace(send=lambda request: f"response to {request.body}")
    clients_module._end_in_time(session, 1.0)
    assert session.send(SimpleNamespace(body="request")) == "response to request"


def test_shared_clients():
    """Queues with the same credentials and Region share their clients."""
    channel = channel_of({"a": {}, "b": {}, "c": {"access_key_id": "other"}, "d": {"region": "r"}})
    clients = make_clients(channel)
    a, b, c, d = (client_of(clients, f"{BASE}/{name}") for name in "abcd")
    assert a is b
    assert len({a, c, d}) == 3
    assert (access_key(a), access_key(c)) == ("key", "other")
    assert d.meta.region_name == "r"


def test_polling_client():
    """Long polls and the calls that settle messages use separate connections."""
    clients = make_clients(channel_of({"a": {}}))
    pair = clients._pair(f"{BASE}/a")
    assert pair.polling._endpoint.http_session is not pair.settling._endpoint.http_session
    assert pair.polling.meta.config.read_timeout > 20
    assert pair.polling.meta.config.retries["total_max_attempts"] == 1


def test_custom_channel(monkeypatch):
    """If a user changes how kombu makes clients, ours have the same key, Region and CA file."""

    def new_sqs_client(self, region, *args, **kwargs):
        session = boto3.Session("custom", "secret", region_name="eu-west-1")
        return session.client("sqs", endpoint_url="https://127.0.0.1:9", verify="/corp/ca.pem")

    monkeypatch.setattr(Channel, "new_sqs_client", new_sqs_client)
    pair = make_clients(channel_of({"a": {}}))._pair(f"{BASE}/a")
    for client in (pair.polling, pair.settling):
        assert (access_key(client), client.meta.region_name) == ("custom", "eu-west-1")
        assert client._endpoint.http_session._verify == "/corp/ca.pem"


def test_refresh_credentials(monkeypatch):
    """``refresh`` makes a client with new credentials, unless the client was made just before."""
    keys = iter(["first", "second", "third"])
    make = Channel.new_sqs_client
    monkeypatch.setattr(
        Channel, "new_sqs_client", lambda self, *a, **k: make(self, "us-east-1", next(keys), "s")
    )
    now = [0.0]
    monkeypatch.setattr(clients_module, "monotonic", lambda: now[0])
    clients, url = make_clients(channel_of({"a": {}})), f"{BASE}/a"
    assert access_key(client_of(clients, url)) == "first"
    clients.refresh(url)
    assert access_key(client_of(clients, url)) == "first", "the client was made just before"
    now[0] = 10.0
    clients.refresh(url)
    assert access_key(client_of(clients, url)) == "second"
    clients.refresh(f"{BASE}/unknown-queue")


class Sts:
    """A fake of AWS STS. It numbers the tokens of each role, and ``age`` makes a token older."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lifetime_seconds: float = 900) -> None:
        self.now = datetime.now(timezone.utc)
        self.lifetime = timedelta(seconds=lifetime_seconds)
        self.tokens: dict[str, int] = {}
        self.fails = False

        def token(channel: Any, role: str, seconds: int) -> dict[str, Any]:
            if self.fails:
                raise OSError("STS is away")
            self.tokens[role] = self.tokens.get(role, 0) + 1
            key = f"{role}-{self.tokens[role]}"
            expires = datetime.now(timezone.utc) + self.lifetime
            return {
                "AccessKeyId": key,
                "SecretAccessKey": "s",
                "SessionToken": "t",
                "Expiration": expires,
            }

        monkeypatch.setattr(Channel, "generate_sts_session_token", token)

    def age(self, client: Any, seconds: float) -> None:
        client._request_signer._credentials._expiry_time -= timedelta(seconds=seconds)


def test_token_renewed(monkeypatch):
    """A role's token is renewed shortly before it expires, and not at each call.

    botocore renews a token in its last 15 minutes. This token lives for only 15 minutes.
    """
    sts = Sts(monkeypatch)
    client = client_of(make_clients(channel_of({"a": {}}, sts_role_arn="r")), f"{BASE}/a")
    assert [access_key(client) for _ in range(3)] == ["r-1"] * 3
    sts.age(client, 500)
    assert access_key(client) == "r-1"
    sts.age(client, 200)
    assert access_key(client) == "r-2"
    assert access_key(client) == "r-2"


def test_hanging_renewal(monkeypatch):
    """While the old token is valid, no call waits for STS to answer with a new one.

    The delayed call might be the one that keeps messages hidden.
    """
    monkeypatch.setattr(clients_module, "_WITH_GOOD_SECONDS", 0.01)
    sts = Sts(monkeypatch)
    client = client_of(make_clients(channel_of({"a": {}}, sts_role_arn="r")), f"{BASE}/a")
    fetch, release = Channel.generate_sts_session_token, threading.Event()

    def hang(*args):
        assert release.wait(5)
        return fetch(*args)

    monkeypatch.setattr(Channel, "generate_sts_session_token", hang)
    sts.age(client, 700)
    assert access_key(client) == "r-1"
    sts.age(client, 190)
    assert access_key(client) == "r-1"
    release.set()
    eventually(lambda: access_key(client) == "r-2")


class HangingSource:
    """A source of credentials that answers only after the test has set ``answers``."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = threading.Event()

    def fetch(self, *_: Any) -> dict[str, Any]:
        self.asked += 1
        assert self.answers.wait(20)
        expires = datetime.now(timezone.utc) + timedelta(hours=1)
        return {
            "access_key": "new",
            "secret_key": "s",
            "token": "t",
            "expiry_time": expires.isoformat(),
        }

    def token(self, *_: Any) -> dict[str, Any]:
        fetched = self.fetch()
        return {
            "AccessKeyId": fetched["access_key"],
            "SecretAccessKey": "s",
            "SessionToken": "t",
            "Expiration": datetime.fromisoformat(fetched["expiry_time"]),
        }


def has_new_key(clients: Clients, url: str) -> bool:
    with contextlib.suppress(CredentialsNotRenewed):
        return access_key(client_of(clients, url)) == "new"
    return False


@pytest.fixture
def hanging():
    source = HangingSource()
    yield source
    source.answers.set()


def call_in_five_seconds(call: Any) -> Any:
    """Return the result of a call. Fail if the call takes more than 5 seconds."""
    future = threads.call_in_time(call, seconds=5)
    assert future is not None
    assert future.done(), "it hangs"
    return future.result()


def test_expired_token(monkeypatch, hanging):
    """If a token has expired and STS does not answer, calls fail soon instead of hanging.

    A worker whose polls hang counts as unhealthy. A restart would not bring a token either.
    """
    sts = Sts(monkeypatch)
    now = [0.0]
    monkeypatch.setattr(clients_module, "monotonic", lambda: now[0])
    clients = make_clients(channel_of({"a": {}}, sts_role_arn="r"))
    url = f"{BASE}/a"
    client = client_of(clients, url)
    monkeypatch.setattr(Channel, "generate_sts_session_token", hanging.token)
    monkeypatch.setattr(clients_module, "_WITHOUT_SECONDS", 0.1)
    sts.age(client, 1000)
    now[0] = 60.0
    for port in (clients.settling(url), clients.polling(url)):
        failure = call_in_five_seconds(port.attributes)
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.code) == (
            Kind.CREDENTIALS_LATE,
            "CredentialsNotRenewed (no answer)",
        )
    assert client_of(clients, url) is client, "a new client would ask the same STS"
    assert hanging.asked == 1
    hanging.answers.set()
    eventually(lambda: has_new_key(clients, url))


@pytest.mark.parametrize("role", [True, False], ids=["sts_role_arn", "web identity"])
def test_no_first_token(monkeypatch, hanging, role):
    """If STS does not answer with a first token, calls fail soon instead of hanging."""
    monkeypatch.setattr(clients_module, "_WITHOUT_SECONDS", 0.1)
    monkeypatch.setattr(Channel, "generate_sts_session_token", hanging.token)
    if not role:
        make = Channel.new_sqs_client

        def with_deferred(self, *args, **kwargs):
            client = make(self, *args, **kwargs)
            client._request_signer._credentials = DeferredRefreshableCredentials(
                hanging.fetch, "assume-role-with-web-identity"
            )
            return client

        monkeypatch.setattr(Channel, "new_sqs_client", with_deferred)
    clients = make_clients(channel_of({"a": {}}, **({"sts_role_arn": "r"} if role else {})))
    port = clients.settling(f"{BASE}/a")
    for _ in range(2):
        failure = call_in_five_seconds(port.attributes)
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.code) == (
            Kind.CREDENTIALS_LATE,
            "CredentialsNotRenewed (no answer)",
        )
    assert hanging.asked <= 1
    hanging.answers.set()
    eventually(lambda: has_new_key(clients, f"{BASE}/a"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ReadTimeoutError(endpoint_url="https://sts"), "ReadTimeoutError"),
        (ConnectTimeoutError(endpoint_url="https://sts"), "ConnectTimeoutError"),
        (ClientError({"Error": {"Code": "AccessDenied"}}, "AssumeRole"), "AccessDenied"),
    ],
    ids=["silent", "not reached", "refuses"],
)
def test_sts_error(monkeypatch, error, code):
    """If STS fails, the failure of the call does not look like a failure of SQS.

    After a timeout of SQS, the call may have been carried out. A call without a token was not sent.
    """
    sts = Sts(monkeypatch)
    clients, url = make_clients(channel_of({"a": {}}, sts_role_arn="r")), f"{BASE}/a"

    def fail(*_):
        raise error

    sts.age(client_of(clients, url), 1000)
    monkeypatch.setattr(Channel, "generate_sts_session_token", fail)
    [failure] = clients.settling(url).delete(["handle"])
    assert failure is not None
    assert (failure.kind, failure.code) == (
        Kind.CREDENTIALS_LATE,
        f"CredentialsNotRenewed ({code})",
    )
    assert not read_queue(clients.settling(url), url, now=0).is_read, "its attributes are not known"


def test_token_expires_in_renewal(monkeypatch):
    """If a token expires while its renewal fails, the call fails and does not use the token.

    botocore ignores the error of a renewal that began while the token was valid.
    """
    sts = Sts(monkeypatch)
    client = client_of(make_clients(channel_of({"a": {}}, sts_role_arn="r")), f"{BASE}/a")

    begun, fails = threading.Event(), threading.Event()

    def fail_late(*_):
        begun.set()
        assert fails.wait(20)
        raise OSError("STS is away")

    monkeypatch.setattr(Channel, "generate_sts_session_token", fail_late)
    monkeypatch.setattr(clients_module, "_WITH_GOOD_SECONDS", 0.0)
    sts.age(client, 700)
    assert access_key(client) == "r-1"
    assert begun.wait(20)
    sts.age(client, 1000)
    threading.Timer(0.1, fails.set).start()
    with pytest.raises(CredentialsNotRenewed, match="expired during the renewal"):
        access_key(client)


def test_two_roles(monkeypatch):
    """If two queues have two roles, the tokens of both roles are renewed.

    kombu remembers one expiry time for all queues, so it would renew only one token.
    """
    sts = Sts(monkeypatch)
    channel = channel_of({"a": {"sts_role_arn": "ra"}, "b": {}, "c": {}}, sts_role_arn="r")
    clients = make_clients(channel)
    a, b, c = (client_of(clients, f"{BASE}/{name}") for name in "abc")
    assert b is c
    for client in (a, b):
        sts.age(client, 890)
    assert (access_key(a), access_key(b)) == ("ra-2", "r-2")


def test_closed_channel(monkeypatch):
    """A token is renewed even if Celery's connection is closed.

    Tasks may end while Celery has no connection, and the worker settles their messages.
    """
    sts = Sts(monkeypatch)
    channel = channel_of({"a": {}}, sts_role_arn="r")
    client = client_of(make_clients(channel), f"{BASE}/a")
    channel.close()
    sts.age(client, 890)
    assert access_key(client) == "r-2"


def test_other_queue_unaffected(monkeypatch, hanging):
    """If STS does not answer for the role of one queue, other queues do not wait."""
    monkeypatch.setattr(Channel, "generate_sts_session_token", hanging.token)
    clients = make_clients(channel_of({"a": {"sts_role_arn": "r"}, "b": {}}))
    waits = threads.call_in_time(lambda: client_of(clients, f"{BASE}/a"), seconds=0.1)
    call_in_five_seconds(lambda: clients.refresh(f"{BASE}/b"))
    assert access_key(call_in_five_seconds(lambda: client_of(clients, f"{BASE}/b"))) == "key"
    assert waits is not None
    assert not waits.done()
    hanging.answers.set()
    assert access_key(waits.result(20)) == "new"
