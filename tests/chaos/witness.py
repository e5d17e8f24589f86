"""A fault proxy that writes each call and its fault to a file, as one JSON object per line.

The access key of a call tells which worker has made it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from aiohttp import web

from celery_sqs_backoff.sqs.dead_letter import ATTRIBUTE_NAME
from tests.support.fault_proxy import Count, Fault, FaultProxy, running
from tests.support.fault_proxy_server import _Proxy

#: The calls that decide the fate of a message.
ACTIONS = (
    "ChangeMessageVisibilityBatch",
    "DeleteMessageBatch",
    "ReceiveMessage",
    "SendMessageBatch",
)

_ACCESS_KEY = re.compile(r"Credential=([^/]+)/")

_call: ContextVar[dict[str, Any]] = ContextVar("call")


class _Witness(_Proxy):
    def __init__(self, upstream: str, log: Path) -> None:
        super().__init__(upstream, latency_ms=0)
        self._log = log.open("a")
        self._message_ids: dict[str, str] = {}  # by receipt handle

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        key = _ACCESS_KEY.search(request.headers.get("Authorization", ""))
        call: dict[str, Any] = {
            "at": time.monotonic(),
            "worker": key[1] if key else None,
            "action": "",
            "fault": None,
            "reached_at": None,
            "entries": [],
            "spoiled": [],  # positions of the entries that the fault has hit
            "succeeded": [],  # positions of the entries that SQS has carried out
            "received": {},  # message ids by receipt handle
        }
        _call.set(call)
        try:
            return await super()._handle(request)
        finally:
            call["answered_at"] = time.monotonic()
            call.pop("positions", None)
            self._log.write(json.dumps(call) + "\n")
            self._log.flush()

    def _fault_for(
        self, action: str, entries: Sequence[Mapping[str, Any]], queue: str
    ) -> tuple[Fault | None, set[int]]:
        fault, failing = super()._fault_for(action, entries, queue)
        call = _call.get()
        call["action"] = action
        call["entries"] = [self._entry(entry) for entry in entries]
        if fault is not None:
            call["fault"] = fault.kind
            call["spoiled"] = sorted(failing) or list(range(len(entries)))
        call["positions"] = {entry["Id"]: n for n, entry in enumerate(entries)}
        return fault, failing

    def _entry(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        record = entry.get("MessageAttributes", {}).get(ATTRIBUTE_NAME, {}).get("StringValue")
        return {
            "message_id": self._message_ids.get(entry.get("ReceiptHandle", "")),
            "task_id": json.loads(record).get("id") if record else None,
            "seconds": entry.get("VisibilityTimeout"),
        }

    async def _forward(self, request: web.BaseRequest, body: bytes, count: Count) -> web.Response:
        answer = await super()._forward(request, body, count)
        call = _call.get()
        if answer.status == 200 and call["action"] in ACTIONS:
            assert isinstance(answer.body, bytes)
            said = json.loads(answer.body)
            call["reached_at"] = time.monotonic()
            call["succeeded"] = [
                call["positions"][entry["Id"]] for entry in said.get("Successful") or []
            ]
            for message in said.get("Messages") or []:
                handle, message_id = message["ReceiptHandle"], message["MessageId"]
                self._message_ids[handle] = call["received"][handle] = message_id
        return answer


@contextmanager
def witness(upstream: str, log: Path) -> Iterator[FaultProxy]:
    """Run a proxy in front of the SQS at ``upstream``. It writes each call to ``log``."""
    options = ("--log", str(log))
    with running(__name__, upstream, *options, output=log.with_suffix(".output")) as proxy:
        yield proxy


def main() -> None:
    """Run the proxy until it is told to stop."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--upstream", required=True, help="SQS endpoint URL to forward to")
    parser.add_argument("--log", required=True, type=Path, help="file that calls are appended to")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_Witness(options.upstream.rstrip("/"), options.log).serve())


if __name__ == "__main__":
    main()
