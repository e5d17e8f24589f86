"""The program of the fault proxy, which runs in its own process. See ``fault_proxy``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import aiohttp
from aiohttp import web

from .fault_proxy import Count, Fault, Rule
from .signing import Signer

_HOP_BY_HOP = {"connection", "content-length", "keep-alive", "transfer-encoding"}


class _Proxy:
    def __init__(self, upstream: str, latency_ms: float, signer: Signer | None = None) -> None:
        self.upstream = upstream
        self.signer = signer
        self.latency_seconds = latency_ms / 1000
        self.rules: list[Rule] = []
        self.counts: dict[str, Count] = {}
        self.recorded: frozenset[str] = frozenset()
        self.requests: deque[tuple[str, Any]] = deque(maxlen=10_000)
        self.port = 0
        self._front: web.Server
        self._listener: asyncio.Server | None = None
        self._reopening: asyncio.TimerHandle | None = None
        self._session: aiohttp.ClientSession

    async def serve(self) -> None:
        self._front = web.Server(self._handle, access_log=None)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        async with aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        ) as self._session:
            await self.listen()
            control = web.AppRunner(_control(self), access_log=None)
            await control.setup()
            await web.TCPSite(control, "127.0.0.1", 0).start()
            urls = {
                "endpoint": f"http://127.0.0.1:{self.port}",
                "control": f"http://127.0.0.1:{control.addresses[0][1]}",
            }
            print(json.dumps(urls), flush=True)  # noqa: T201  # the parent process reads the URLs
            await asyncio.Event().wait()

    async def listen(self) -> None:
        if self._reopening:
            self._reopening.cancel()
        if self._listener is None:
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_server(self._front, "127.0.0.1", self.port)
            self.port = self._listener.sockets[0].getsockname()[1]

    def hang_up(self, seconds: float | None) -> None:
        if self._listener:
            self._listener.close()
            self._listener = None
        for connection in self._front.connections:
            if connection.transport:
                connection.transport.abort()
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self._reopening = loop.call_later(
                seconds, lambda: setattr(self, "_opening", loop.create_task(self.listen()))
            )

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        action = request.headers.get("X-Amz-Target", "").rpartition(".")[2]
        count = self.counts.setdefault(action, Count())
        count.calls += 1
        parsed: dict[str, Any] = {}
        if (
            action.endswith("Batch")
            or action in self.recorded
            or any(rule.fault.queue for rule in self.rules)
        ):
            parsed = json.loads(body)
        entries = parsed.get("Entries", [])
        count.entries += len(entries)
        if action in self.recorded:
            self.requests.append((action, parsed))
        fault, failing = self._fault_for(action, entries, parsed.get("QueueUrl", ""))
        if self.latency_seconds:
            await asyncio.sleep(self.latency_seconds)
        if fault is None:
            return await self._forward(request, body, count)
        count.faults += 1
        if fault.kind == "error":
            return _error(fault)
        if fault.kind == "fail-entries":
            return await self._forward_rest(request, parsed, failing, fault, count)
        if fault.kind == "drop-before":
            return _drop(request)
        answer = await self._forward(request, body, count)
        if fault.kind == "drop-after":
            return _drop(request)
        await asyncio.sleep(fault.seconds)
        return answer

    def _fault_for(
        self, action: str, entries: Sequence[Mapping[str, Any]], queue: str
    ) -> tuple[Fault | None, set[int]]:
        for rule in self.rules:
            failing = rule.spoils(action, entries, queue)
            if failing is not None:
                return rule.fault, failing
        return None, set()

    async def _forward(self, request: web.BaseRequest, body: bytes, count: Count) -> web.Response:
        url = self.upstream + request.path_qs
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        if self.signer is not None:
            headers = self.signer.sign(request.method, url, headers, body)
        try:
            async with self._session.request(
                request.method, url, data=body, headers=headers
            ) as answer:
                content = await answer.read()
        except aiohttp.ClientError as exc:
            return _error(Fault(kind="error", status=502, code="BadGateway", message=repr(exc)))
        if request.headers.get("X-Amz-Target", "").endswith(".ReceiveMessage"):
            count.messages += len(json.loads(content).get("Messages") or [])
        headers = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
        return web.Response(status=answer.status, body=content, headers=headers)

    async def _forward_rest(
        self,
        request: web.BaseRequest,
        batch: dict[str, Any],
        failing: set[int],
        fault: Fault,
        count: Count,
    ) -> web.Response:
        entries = batch["Entries"]
        result: dict[str, Any] = {"Successful": [], "Failed": []}
        rest = [entry for i, entry in enumerate(entries) if i not in failing]
        if rest:
            body = json.dumps({**batch, "Entries": rest}).encode()
            answer = await self._forward(request, body, count)
            if answer.status != 200:
                return answer
            assert isinstance(answer.body, bytes)
            result |= json.loads(answer.body)
        result["Failed"] = [
            *(result.get("Failed") or []),
            *(
                {
                    "Id": entries[i]["Id"],
                    "Code": fault.code,
                    "Message": fault.message,
                    "SenderFault": fault.sender_fault,
                }
                for i in sorted(failing)
            ),
        ]
        return _json(200, result)


def _error(fault: Fault) -> web.Response:
    whose = "Sender" if fault.sender_fault else "Receiver"
    return _json(
        fault.status,
        {"__type": f"com.amazonaws.sqs#{fault.code}", "message": fault.message},
        {"x-amzn-query-error": f"{fault.code};{whose}"},
    )


def _json(
    status: int, content: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        status=status,
        body=json.dumps(content).encode(),
        headers={
            "Content-Type": "application/x-amz-json-1.0",
            "x-amzn-RequestId": "00000000-0000-0000-0000-000000000000",
            **(headers or {}),
        },
    )


def _drop(request: web.BaseRequest) -> web.Response:
    if request.transport:
        request.transport.abort()
    return web.Response()  # no client gets it, but aiohttp expects a response


def _control(proxy: _Proxy) -> web.Application:
    routes = web.RouteTableDef()

    @routes.get("/counts")
    async def counts(request: web.Request) -> web.Response:
        return web.json_response({action: asdict(c) for action, c in proxy.counts.items()})

    @routes.get("/requests")
    async def requests(request: web.Request) -> web.Response:
        return web.json_response(list(proxy.requests))

    @routes.post("/{what}")
    async def change(request: web.Request) -> web.Response:
        value = await request.json()
        match request.match_info["what"]:
            case "reset":
                proxy.counts.clear()
                proxy.requests.clear()
            case "faults":
                proxy.rules += [Rule(Fault(**fault)) for fault in value]
            case "heal":
                proxy.rules = [r for r in proxy.rules if value and r.fault.queue != value]
                await proxy.listen()
            case "latency":
                proxy.latency_seconds = value / 1000
            case "unreachable":
                proxy.hang_up(value)
            case "record":
                proxy.recorded = frozenset(value)
            case _:
                raise web.HTTPNotFound
        return web.json_response(None)

    app = web.Application()
    app.add_routes(routes)
    return app


def main() -> None:
    """Run the proxy until it is told to stop."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--upstream", required=True, help="SQS endpoint URL to forward to")
    parser.add_argument("--latency-ms", type=float, default=0, help="added to each call; default 0")
    parser.add_argument(
        "--sign", action="store_true", help="sign requests for AWS with boto3's credentials"
    )
    options = parser.parse_args()
    signer = Signer() if options.sign else None
    proxy = _Proxy(options.upstream.rstrip("/"), options.latency_ms, signer)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(proxy.serve())
