"""A console's answers, over HTTP, as a browser without scripts gets them."""

import asyncio
import http.client
import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import unescape
from typing import Self
from urllib.parse import urlencode


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    text: str

    @property
    def words(self) -> str:
        """The text that a reader sees."""
        body = re.sub(r"(?s)<head>.*?</head>|<svg.*?</svg>", " ", self.text)
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())

    @property
    def form(self) -> str:
        """The hidden value of the page's forms."""
        found = re.search(r'name="form" value="([^"]+)"', self.text)
        return "" if found is None else found[1]


class Browser:
    """Keeps cookies, and follows no redirects."""

    def __init__(self, address: str, host: str = "") -> None:
        self.address = address
        self.host = host or address
        self.cookies: dict[str, str] = {}

    def signed_out(self) -> Self:
        return type(self)(self.address, self.host)

    async def get(self, path: str, **query: object) -> Answer:
        given = {name.rstrip("_"): str(value) for name, value in query.items()}
        return await self.send("GET", path + (f"?{urlencode(given)}" if given else ""))

    async def post(
        self, path: str, fields: Mapping[str, str], *, origin: str | None = None
    ) -> Answer:
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        shown = f"http://{self.host}" if origin is None else origin
        if shown:
            headers["Origin"] = shown
        return await self.send("POST", path, urlencode(fields), headers)

    async def send(
        self, method: str, path: str, body: str = "", headers: Mapping[str, str] | None = None
    ) -> Answer:
        return await asyncio.to_thread(self._send, method, path, body, dict(headers or {}))

    def _send(self, method: str, path: str, body: str, headers: dict[str, str]) -> Answer:
        connection = http.client.HTTPConnection(self.address, timeout=30)
        headers["Host"] = self.host
        if self.cookies:
            headers["Cookie"] = "; ".join(f"{name}={each}" for name, each in self.cookies.items())
        try:
            connection.request(method, path, body or None, headers)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        for cookie in response.headers.get_all("Set-Cookie", []):
            name, _, value = cookie.partition(";")[0].partition("=")
            self.cookies[name] = value.strip('"')
        return Answer(response.status, response.headers, text)
