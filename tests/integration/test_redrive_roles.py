"""Commands use a queue with the credentials that its worker uses: its role, or its keys."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs
from urllib.request import Request, urlopen

import pytest
from celery import Celery
from celery.bin.celery import celery
from click.testing import CliRunner

from celery_sqs_backoff import redrive
from celery_sqs_backoff.doctor.look import look
from celery_sqs_backoff.testing import LocalQueue, local_sqs_settings

ROLE = "arn:aws:iam::123456789012:role/mail"

_TOKEN = """<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult>
<AssumedRoleUser><AssumedRoleId>A:s</AssumedRoleId><Arn>{role}</Arn></AssumedRoleUser>
<Credentials><AccessKeyId>key-of-{name}</AccessKeyId><SecretAccessKey>s</SecretAccessKey>
<SessionToken>t</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials>
</AssumeRoleResult></AssumeRoleResponse>"""


class Account:
    """STS, and in front of SQS a note of who calls what on which queue."""

    def __init__(self, endpoint: str) -> None:
        self.sqs, self.endpoint = endpoint, ""
        self.assumed: list[str] = []
        self.callers: defaultdict[str, set[str]] = defaultdict(set)

    def respond(self, headers: Any, body: bytes) -> tuple[int, bytes]:
        if b"Action=AssumeRole" in body:
            [role] = parse_qs(body.decode())["RoleArn"]
            self.assumed.append(role)
            return 200, _TOKEN.format(role=role, name=role.rpartition("/")[2]).encode()
        found = re.search("Credential=([^/]+)/", headers["Authorization"])
        assert found is not None
        request = json.loads(body)
        queue = request.get("QueueName") or request.get("QueueUrl", "").rpartition("/")[2]
        self.callers[queue].add(found[1])
        try:
            with urlopen(Request(self.sqs, data=body, headers=dict(headers))) as response:
                return response.status, response.read()
        except HTTPError as exc:
            return exc.code, exc.read()


@pytest.fixture
def account(sqs_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    account = Account(sqs_endpoint)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, content = account.respond(self.headers, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            """Leave pytest its output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    account.endpoint = f"http://127.0.0.1:{server.server_port}"
    for name, value in {
        "AWS_ENDPOINT_URL_STS": account.endpoint,
        "AWS_ACCESS_KEY_ID": "operator",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    yield account
    server.shutdown()
    server.server_close()


def redrives(app: Celery, queue: LocalQueue) -> None:
    assert queue.dlq is not None
    assert redrive(app, queue.dlq.name).sent == 1


def asks_for_status(app: Celery, queue: LocalQueue) -> None:
    result = CliRunner().invoke(celery, ["-A", "shop", "sqs-status", "--json"])
    assert json.loads(result.stdout)["queues"][0]["dead_letters"] == 1


def calls_the_doctor(app: Celery, queue: LocalQueue) -> None:
    [facts] = look(app).queues
    assert facts.dlq is not None
    assert facts.dlq.failure is None


@pytest.mark.parametrize("command", [redrives, asks_for_status, calls_the_doctor])
@pytest.mark.parametrize("is_role", [True, False], ids=["role", "keys"])
def test_a_command_is_who_the_worker_is(
    account: Account,
    queue: LocalQueue,
    sqs: Any,
    command: Callable[[Celery, LocalQueue], None],
    is_role: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also on the dead-letter queue, which is not predefined itself."""
    assert queue.dlq is not None
    sqs.send_message(QueueUrl=queue.dlq.url, MessageBody="{}")
    app = Celery("roles", set_as_current=False)
    app.conf.update(local_sqs_settings(account.endpoint, queue))
    own = (
        {"sts_role_arn": ROLE}
        if is_role
        else {"access_key_id": "key-of-mail", "secret_access_key": "s"}
    )
    app.conf.broker_transport_options["predefined_queues"] = {
        queue.name: {"url": f"{account.endpoint}/000000000000/{queue.name}", **own}
    }
    monkeypatch.setattr("celery.bin.celery.find_app", lambda name: app)
    command(app, queue)
    assert account.callers == {queue.name: {"key-of-mail"}, queue.dlq.name: {"key-of-mail"}}
    assert account.assumed == ([ROLE] if is_role else [])
