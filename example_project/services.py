"""Start a local SQS and a fake mail provider, and talk to them."""

from __future__ import annotations

import json
import socket
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import ProxyHandler, Request, build_opener

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from .processes import DemoError, Programs
from .provider import Behaviour

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

#: SQS allows no more. With this number, ``retry_for`` ends the retries before SQS does.
MAX_RECEIVE_COUNT = 1000


@dataclass(frozen=True)
class Queue:
    url: str
    dlq_url: str


@dataclass(frozen=True)
class Counts:
    """The numbers of messages of a queue: visible, hidden, and in its dead-letter queue."""

    visible: int
    hidden: int
    dead: int


class SQS:
    """A local SQS (ministack)."""

    def __init__(self, programs: Programs, directory: Path, *, port: int = 0) -> None:
        self.address = f"127.0.0.1:{_free_port(port)}"
        programs.start(
            "sqs",
            "ministack",
            env={
                "BIND_HOST": "127.0.0.1",
                "GATEWAY_PORT": self.address.rpartition(":")[2],
                "SERVICES": "sqs",
                "SFTP_ENABLED": "0",
                "IOT_MTLS_ENABLED": "0",
                "LOG_LEVEL": "WARNING",
                "TMPDIR": str(directory),  # ministack writes its pid file here
            },
        )
        self._client: SQSClient = boto3.Session(
            region_name="us-east-1", aws_access_key_id="local", aws_secret_access_key="local"
        ).client(
            "sqs",
            endpoint_url=f"http://{self.address}",
            config=Config(connect_timeout=2, read_timeout=5, proxies={}),
        )
        programs.wait_for(self._answers, "the local SQS answers")

    @property
    def broker_url(self) -> str:
        return f"sqs://local:local@{self.address}"

    def create_queue(self, name: str) -> Queue:
        """Create a queue with a dead-letter queue."""
        create, attributes = self._client.create_queue, self._client.get_queue_attributes
        dlq_url = create(QueueName=f"{name}-dlq")["QueueUrl"]
        dlq = attributes(QueueUrl=dlq_url, AttributeNames=["QueueArn"])["Attributes"]
        redrive = {
            "deadLetterTargetArn": dlq["QueueArn"],
            "maxReceiveCount": str(MAX_RECEIVE_COUNT),
        }
        url = create(QueueName=name, Attributes={"RedrivePolicy": json.dumps(redrive)})["QueueUrl"]
        return Queue(url, dlq_url)

    def counts(self, queue: Queue) -> Counts:
        main, dead = self._attributes(queue.url), self._attributes(queue.dlq_url)
        visible, hidden = "ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"
        return Counts(
            visible=int(main[visible]),
            hidden=int(main[hidden]),
            dead=int(dead[visible]) + int(dead[hidden]),
        )

    def dead_mails(self, queue: Queue) -> set[int]:
        """Return the IDs of the mails in the dead-letter queue. They stay there, but hidden."""
        found = set()
        while messages := self._client.receive_message(
            QueueUrl=queue.dlq_url, MaxNumberOfMessages=10
        ).get("Messages"):
            for message in messages:
                envelope = json.loads(b64decode(message["Body"]))
                (mail_id,), *_ = json.loads(b64decode(envelope["body"]))
                found.add(mail_id)
        return found

    def _attributes(self, url: str) -> dict[str, str]:
        answer = self._client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])
        return {str(name): value for name, value in answer["Attributes"].items()}

    def _answers(self) -> bool:
        try:
            self._client.list_queues()
        except (BotoCoreError, ClientError):
            return False
        return True


class MailProvider:
    """Starts the fake mail provider of ``provider.py``, and talks to it over HTTP."""

    def __init__(self, programs: Programs, name: str, *options: str) -> None:
        program = programs.start(name, "example_project.provider", *options)
        addresses = json.loads(programs.wait_for(program.first_line, "the mail provider starts"))
        self.url: str = addresses["url"]
        self._control_url: str = addresses["control_url"]
        self._open = build_opener(ProxyHandler({})).open

    def behave(self, behaviour: Behaviour) -> None:
        self._ask("/", asdict(behaviour))

    def report(self) -> dict[str, Any]:
        """Return the numbers of ``calls``, ``mails`` and ``duplicates``, and ``first_call_at``."""
        report: dict[str, Any] = self._ask("/")
        return report

    def calls(self) -> list[tuple[float, int]]:
        """Return the time of each call, in seconds since the epoch, and the status it got."""
        return [(when, status) for when, status in self._ask("/calls")]

    def sent(self) -> set[int]:
        """Return the IDs of all mails that were sent."""
        return set(self._ask("/sent"))

    def _ask(self, path: str, content: Mapping[str, Any] | None = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        with self._open(Request(self._control_url + path, data=data), timeout=5) as answer:
            return json.load(answer)


def _free_port(wanted: int) -> int:
    """Return a free port. It is the wanted one, or any port for 0.

    Raises:
        DemoError: another server uses the wanted port.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", wanted))
        except OSError as exc:
            raise DemoError(f"port {wanted} of 127.0.0.1 cannot be used: {exc.strerror}") from exc
        return int(listener.getsockname()[1])
