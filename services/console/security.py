"""What browsers may do to the console: headers, hosts, cookies, and forms.

A reader's token is kept in a cookie that scripts cannot read and that no other site can have sent
(HttpOnly, SameSite=Strict); the console stores nothing. A form is accepted only from a page of the
console: its Origin must be the console's own, and it must carry the value of a second such cookie.
"""

import hmac
import secrets
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from starlette.requests import Request
from starlette.responses import Response

from seqgate.services.console.config import ConsoleConfig
from seqgate.tls import is_loopback

TOKEN_CHARACTERS_MAX: Final = 3_800
"""The longest token: browsers keep cookies of up to 4,096 bytes with name and attributes."""

FORM_BYTES_MAX: Final = 64 * 1024
"""The largest form, in bytes."""

FORMS_BYTES_MAX: Final[Mapping[str, int]] = {"/mend": 512 * 1024}
"""The same of forms that take more, by path: a payload, whose bytes may be three in the form."""

FORM_FIELDS_MAX: Final = 250
"""The most fields of a form."""

SESSION_S: Final = 12 * 3600
"""How long a browser keeps a token, in seconds. The token's own expiry may end it sooner."""

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "style-src 'self'",
        "script-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
"""Sent with every answer."""


class Refused(Exception):
    """A request that a page of the console would not have sent."""


class Cookies:
    """The cookies, whose names bind them to this host where there is TLS."""

    def __init__(self, config: ConsoleConfig) -> None:
        prefix = "__Host-" if config.is_secure else ""
        self._token = f"{prefix}seqgate-token"
        self._form = f"{prefix}seqgate-form"
        self._prefix = f"{prefix}seqgate-prefix"
        self._is_secure = config.is_secure

    def token(self, request: Request) -> str:
        """The reader's token; empty: not signed in."""
        return request.cookies.get(self._token, "")

    def form(self, request: Request) -> str:
        """The value that forms carry; empty: the browser has none yet."""
        return request.cookies.get(self._form, "")

    def prefix(self, request: Request) -> str:
        """The prefix with which the reader last listed topics; empty: none."""
        return unquote(request.cookies.get(self._prefix, ""))

    def set_token(self, response: Response, token: str) -> None:
        self._set(response, self._token, token, SESSION_S)

    def forget_token(self, response: Response) -> None:
        self._set(response, self._token, "", 0)

    def set_form(self, response: Response, value: str) -> None:
        self._set(response, self._form, value, None)

    def set_prefix(self, response: Response, value: str) -> None:
        self._set(response, self._prefix, quote(value, safe=""), SESSION_S)

    def _set(self, response: Response, name: str, value: str, age_s: int | None) -> None:
        response.set_cookie(
            name, value, max_age=age_s, httponly=True, samesite="strict", secure=self._is_secure
        )


def new_form_value() -> str:
    return secrets.token_urlsafe(32)


def check_host(config: ConsoleConfig, request: Request) -> None:
    """Refuse another host's name, under which a foreign page may have reached this machine (DNS
    rebinding). Raises Refused."""
    host = request.headers.get("host", "").lower()
    if config.origin:
        if host != urlsplit(config.origin).netloc:
            raise Refused(f"the host is not {urlsplit(config.origin).netloc}")
    elif not is_loopback(host if ":" in host else f"{host}:80"):
        raise Refused("the host is not this machine: set origin")


def check_form(request: Request, config: ConsoleConfig, expected: str, given: str) -> None:
    """Raises Refused unless a form comes from a page of the console."""
    origin = request.headers.get("origin", "")
    scheme = "https" if config.is_secure else "http"
    if origin.lower() != (config.origin or f"{scheme}://{request.headers.get('host', '')}".lower()):
        raise Refused("the form comes from another origin")
    if not expected or not hmac.compare_digest(expected.encode(), given.encode()):
        raise Refused("the form has expired: load its page again")


def local_path(text: str) -> str:
    """Where to go after signing in: a path of the console, or its start page."""
    parts = urlsplit(text)
    is_local = text.startswith("/") and not text.startswith(("//", "/\\")) and not parts.netloc
    return text if is_local and "\\" not in text and text.isprintable() else "/"
