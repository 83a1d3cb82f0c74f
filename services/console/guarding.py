"""Around every request: its host is checked, its answer has the headers of security, and it is
measured."""

import time
from collections.abc import Set
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seqgate.services.console.config import ConsoleConfig
from seqgate.services.console.security import HEADERS, Refused, check_host
from seqgate.services.runtime.metrics import Recorder
from seqgate.telemetry.metrics import HTTP_METHOD, OTHER


class Guarded:
    """Checks a request's host, adds HEADERS to every answer, and measures it."""

    def __init__(
        self, app: ASGIApp, config: ConsoleConfig, paths: Set[str], record: Recorder
    ) -> None:
        self._app = app
        self._paths = paths
        self._record = record
        self._config = config
        headers = dict(HEADERS)
        if config.is_secure:
            headers["Strict-Transport-Security"] = "max-age=31536000"
        self._headers = [(name.lower().encode(), each.encode()) for name, each in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        began_s = time.monotonic()
        status = HTTPStatus.INTERNAL_SERVER_ERROR.value

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *self._headers]
            await send(message)

        try:
            if scope["path"] not in ("/healthz", "/readyz"):  # probes name an address
                check_host(self._config, Request(scope))
            await self._app(scope, receive, sending)
        except Refused as refusal:
            await refuse(Request(scope), refusal)(scope, receive, sending)
        finally:
            route = scope["path"] if scope["path"] in self._paths else OTHER
            method = scope["method"] if scope["method"] in HTTP_METHOD.values else "_OTHER"
            took_s = time.monotonic() - began_s
            self._record(took_s, method, route, str(status), scope["scheme"])


def refuse(_: Request, refusal: Exception) -> Response:
    return PlainTextResponse(f"Refused: {refusal}", HTTPStatus.FORBIDDEN)
