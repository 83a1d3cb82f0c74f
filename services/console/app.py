"""The console, wired by hand. The `async with` is the life of the process.

pages.PAGES, .ACTIONS    pages, and what their forms do
/sign-in, /sign-out      with credentials = token
/static/...              the style sheet, the script, the icon
/healthz, /readyz        probes: the process answers; the services' ledger answers
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlencode

import jinja2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from seqgate import errors
from seqgate.api.ledger.v1 import ledger_pb2
from seqgate.client._calls import Calls
from seqgate.services.console.calls import calls_of, reading_as
from seqgate.services.console.config import ConsoleConfig
from seqgate.services.console.guarding import Guarded, refuse
from seqgate.services.console.pages import ACTIONS, PAGES, Action, Place
from seqgate.services.console.pages.cluster import addresses_of
from seqgate.services.console.pages.owners import NotOwned
from seqgate.services.console.pages.visit import Memory, Reader, Values, Visit
from seqgate.services.console.security import (
    FORM_BYTES_MAX,
    FORM_FIELDS_MAX,
    FORMS_BYTES_MAX,
    TOKEN_CHARACTERS_MAX,
    Cookies,
    Refused,
    check_form,
    local_path,
    new_form_value,
)
from seqgate.services.console.serving import serving
from seqgate.services.runtime.metrics import OFF, Metrics, telling
from seqgate.services.runtime.server import told_to_stop
from seqgate.telemetry.metrics import HTTP_REQUESTS
from seqgate.types import InvalidNameError

HERE: Final = Path(__file__).parent

NAVIGATION: Final = (
    ("/", "Overview"),
    ("/topics", "Topics"),
    ("/subscriptions", "Subscriptions"),
    ("/cluster", "Cluster"),
)
"""(path, name) of the pages that every page links to."""

LISTING: Final = ("/", "/topics", "/subscriptions")
"""The pages that list topics by a prefix, which a reader's rights must cover."""

PREFIX_CHARACTERS_MAX: Final = 300
"""The longest prefix that is remembered for a reader."""

_STATUS: Final[Mapping[type[errors.SeqgateError], HTTPStatus]] = {
    errors.AuthenticationError: HTTPStatus.UNAUTHORIZED,
    errors.PermissionDeniedError: HTTPStatus.FORBIDDEN,
    errors.NotFoundError: HTTPStatus.NOT_FOUND,
    errors.InvalidRequestError: HTTPStatus.BAD_REQUEST,
    errors.UnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.InUseError: HTTPStatus.CONFLICT,
}

_TITLES: Final = {
    HTTPStatus.FORBIDDEN: "Not permitted",
    HTTPStatus.NOT_FOUND: "Not found",
    HTTPStatus.BAD_REQUEST: "Not a valid request",
    HTTPStatus.CONFLICT: "Not possible now",
    HTTPStatus.SERVICE_UNAVAILABLE: "Not available",
}


async def run(config: ConsoleConfig) -> None:
    """Serve until the process is asked to stop."""
    async with telling(config) as metrics:
        calls = calls_of(config, metrics)
        try:
            async with serving(config, Console(config, calls, metrics).app):
                await told_to_stop()
        finally:
            await calls.close()


class Console:
    """The application: which page answers which request, and for whom."""

    def __init__(self, config: ConsoleConfig, calls: Calls, metrics: Metrics = OFF) -> None:
        self._config = config
        self._calls = calls
        self._cookies = Cookies(config)
        self._memory = Memory()
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "templates"),
            autoescape=True,
            trim_blocks=True,
            undefined=jinja2.ChainableUndefined,
        )
        self._templates.filters["urlencode"] = _urlencoded
        routes = [
            Route(path, partial(self._page, shown), methods=["GET"])
            for path, shown in PAGES.items()
        ]
        routes += [
            Route(path, partial(self._act, action), methods=["POST"])
            for path, action in ACTIONS.items()
        ]
        routes += [
            Route("/sign-in", self._sign_in, methods=["GET", "POST"]),
            Route("/sign-out", self._sign_out, methods=["POST"]),
            Route("/healthz", _alive, methods=["GET"]),
            Route("/readyz", self._ready, methods=["GET"]),
        ]
        statics = Mount("/static", StaticFiles(directory=HERE / "static"))
        self.app: ASGIApp = Guarded(
            Starlette(routes=[*routes, statics], exception_handlers={Refused: refuse}),
            config,
            frozenset(each.path for each in routes),
            metrics.histogram(HTTP_REQUESTS),
        )

    async def _page(self, shown: Place, request: Request) -> Response:
        async def answer(visit: Visit) -> Response:
            values = await shown.page(visit)
            response = self._html(
                request, shown.template, values, section=shown.section, is_live=shown.is_live
            )
            prefix = visit.query.get("prefix", "")
            if prefix != visit.prefix and 0 < len(prefix) <= PREFIX_CHARACTERS_MAX:
                self._cookies.set_prefix(response, prefix)
            return response

        return await self._as_reader(request, shown.section, answer)

    async def _act(self, action: Action, request: Request) -> Response:
        form = await self._form(request)
        if self._config.credentials == "certificate":
            raise Refused("this console is read-only: its certificate is not its reader's")

        async def answer(visit: Visit) -> Response:
            done = await action(visit, form)
            if isinstance(done, str):
                return RedirectResponse(local_path(done), HTTPStatus.SEE_OTHER)
            shown = PAGES[request.url.path]
            status = HTTPStatus.BAD_REQUEST
            return self._html(request, shown.template, done, section=shown.section, status=status)

        return await self._as_reader(request, "/subscriptions", answer)

    async def _as_reader(
        self, request: Request, section: str, answer: Callable[[Visit], Awaitable[Response]]
    ) -> Response:
        """The answer to a reader, whose token every call inside carries."""
        token = self._token(request)
        if self._config.credentials == "token" and not token:
            return self._to_sign_in(request)
        visit = Visit(
            Reader.of(token),
            dict(request.query_params),
            self._calls,
            self._memory,
            self._config,
            self._cookies.prefix(request),
        )
        try:
            with reading_as(token):
                return await answer(visit)
        except errors.AuthenticationError as error:
            return self._to_sign_in(request, error.reason)
        except InvalidNameError as error:
            return self._refused(request, errors.InvalidRequestError(str(error)), section)
        except NotOwned:
            return self._html(request, "unowned.html", _address(request), section=section)
        except errors.PermissionDeniedError as error:
            if request.url.path in LISTING and visit.prefix and not visit.query.get("prefix"):
                query = urlencode({"prefix": visit.prefix})
                return RedirectResponse(f"{request.url.path}?{query}", HTTPStatus.SEE_OTHER)
            return self._refused(request, error, section)
        except errors.SeqgateError as error:
            return self._refused(request, error, section)

    # ---- signing in

    async def _sign_in(self, request: Request) -> Response:
        if self._config.credentials != "token":
            return RedirectResponse("/", HTTPStatus.SEE_OTHER)
        if request.method == "GET":
            query = request.query_params
            reason = query.get("reason", "")
            fault = _SIGNED_OUT.get(reason, "")
            values = {
                "next": local_path(query.get("next", "/")),
                "fault": fault,
                # A link on another site comes without the cookie, which a link of ours would bring.
                "is_foreign": request.headers.get("sec-fetch-site") == "cross-site",
            }
            return self._html(request, "sign-in.html", values)
        form = await self._form(request)
        token, then = form.get("token", "").strip(), local_path(form.get("next", "/"))
        fault = _token_fault(token)
        if not fault:
            try:
                with reading_as(token):
                    await self._calls.call(ledger_pb2.ListTopicsRequest(page_size=1))
            except errors.AuthenticationError as error:
                fault = f"The token is not accepted: {error}"
            except errors.UnavailableError as error:
                fault = str(error)
            except errors.SeqgateError:
                pass  # it is known who the reader is, if not what for
        if fault:
            return self._html(
                request, "sign-in.html", {"next": then, "fault": fault}, status=HTTPStatus.FORBIDDEN
            )
        response = RedirectResponse(then, HTTPStatus.SEE_OTHER)
        self._cookies.set_token(response, token)
        return response

    async def _sign_out(self, request: Request) -> Response:
        await self._form(request)
        response = RedirectResponse("/sign-in", HTTPStatus.SEE_OTHER)
        self._cookies.forget_token(response)
        return response

    def _to_sign_in(self, request: Request, reason: str = "") -> Response:
        query = {"next": _address(request)["next"], **({"reason": reason} if reason else {})}
        response = RedirectResponse(f"/sign-in?{urlencode(query)}", HTTPStatus.SEE_OTHER)
        if reason:
            self._cookies.forget_token(response)
        return response

    def _token(self, request: Request) -> str:
        return self._cookies.token(request) if self._config.credentials == "token" else ""

    async def _form(self, request: Request) -> dict[str, str]:
        """The fields of a form of the console's own. Raises Refused for any other."""
        body = b""
        limit = FORMS_BYTES_MAX.get(request.url.path, FORM_BYTES_MAX)
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise Refused(f"the form is too large (limit {limit:,} bytes)")
        fields = {
            name: values[0]
            for name, values in parse_qs(
                body.decode(errors="replace"),
                keep_blank_values=True,
                max_num_fields=FORM_FIELDS_MAX,
            ).items()
        }
        check_form(request, self._config, self._cookies.form(request), fields.get("form", ""))
        return fields

    # ---- answers

    def _html(
        self,
        request: Request,
        template: str,
        values: Values,
        *,
        section: str = "",
        is_live: bool = False,
        status: HTTPStatus = HTTPStatus.OK,
    ) -> Response:
        had = self._cookies.form(request)
        form_value = had or new_form_value()
        credentials = self._config.credentials
        text = self._templates.get_template(template).render(
            navigation=NAVIGATION,
            section=section,
            is_live=is_live,
            is_in=credentials != "token" or bool(section),
            credentials=credentials,
            refresh_ms=round(self._config.refresh_s * 1000),
            form_value=form_value,
            utc=UTC,
            **values,
        )
        response = Response(
            text, status, {"Cache-Control": "no-store"}, media_type="text/html; charset=utf-8"
        )
        if not had:
            self._cookies.set_form(response, form_value)
        return response

    def _refused(self, request: Request, error: errors.SeqgateError, section: str) -> Response:
        kinds = (status for kind, status in _STATUS.items() if isinstance(error, kind))
        status = next(kinds, HTTPStatus.BAD_GATEWAY)
        values = {
            "title": _TITLES.get(status, "Not shown"),
            "message": str(error),
            "reason": error.reason,
            "denied": status is HTTPStatus.FORBIDDEN and request.url.path in LISTING,
            "path": request.url.path,
            "prefix": request.query_params.get("prefix", ""),
        }
        return self._html(request, "refused.html", values, section=section, status=status)

    async def _ready(self, _: Request) -> Response:
        """Ready while the ledger service accepts connections. The console asks nothing of it: it
        has no rights."""
        target = self._config.ledger_target
        try:
            async with asyncio.timeout(1):
                await self._reached(target)
        except (TimeoutError, OSError):
            return PlainTextResponse("the ledger service does not answer", 503)
        return PlainTextResponse("ready")

    async def _reached(self, target: str) -> None:
        address = (await addresses_of(target))[0]
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()


_SIGNED_OUT: Final = {
    "TOKEN_EXPIRED": "Your token has expired.",
    "INVALID_TOKEN": "Your token is no longer accepted.",
    "WRONG_AUDIENCE": "Your token is for another audience.",
    "WRONG_ISSUER": "Your token is from another issuer.",
    "MISSING_CREDENTIALS": "Sign in first.",
}


def _address(request: Request) -> Values:
    """The request's path as `next`, to come back to, and what it names."""
    path, query = request.url.path, request.query_params
    return {
        "next": f"{path}?{request.url.query}" if request.url.query else path,
        "topic": query.get("topic", ""),
        "subscription": query.get("subscription", ""),
    }


def _token_fault(token: str) -> str:
    if not token.isascii() or not token.isprintable() or " " in token or not token:
        return "A token has letters, digits and . _ ~ + / = - only."
    if len(token) > TOKEN_CHARACTERS_MAX:
        return f"The token is too long for a cookie (limit {TOKEN_CHARACTERS_MAX:,} characters)."
    return ""


def _urlencoded(values: dict[str, Any]) -> str:
    return urlencode({name: value for name, value in values.items() if value not in (None, "")})


async def _alive(_: Request) -> Response:
    return PlainTextResponse("alive")
