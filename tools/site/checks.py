"""Reads the built site: every link and anchor leads somewhere, and no page loads from elsewhere."""

from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

LOADED: Final = {
    "audio": "src",
    "embed": "src",
    "iframe": "src",
    "img": "src",
    "link": "href",
    "object": "data",
    "script": "src",
    "source": "src",
    "video": "src",
}
"""The elements that a browser loads by itself, and their attributes."""

LINKS: Final = frozenset({"canonical", "next", "prev"})
"""Relations of <link> that only name a page."""

HERE: Final = "http://site.invalid/"


class Page(NamedTuple):
    ids: frozenset[str]
    links: tuple[str, ...]
    loads: tuple[str, ...]
    text: str


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        for name in ("id", "name"):
            if tag != "meta" and given.get(name):
                self.ids.add(given[name] or "")
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        loaded = given.get(LOADED.get(tag, ""))
        if loaded and given.get("rel") not in LINKS:
            self.loads.append(loaded)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@cache
def read(file: Path) -> Page:
    reader = _Reader()
    reader.feed(file.read_text())
    return Page(
        frozenset(reader.ids), tuple(reader.links), tuple(reader.loads), "".join(reader.text)
    )


def faults(site: Path) -> Iterator[str]:
    """Every fault, as "page: fault"."""
    read.cache_clear()
    for file in sorted(site.rglob("*.html")):
        page, name = read(file), file.relative_to(site).as_posix()
        for target in page.loads:
            if not _is_here(target):
                yield f"{name}: loads {target}"
        for target in {*page.links, *page.loads}:
            if _is_here(target) and (fault := _broken(site, name, target)):
                yield f"{name}: {fault}"
    for file in sorted(site.rglob("*.css")):
        text = file.read_text()
        if "@import" in text or "url(http" in text or "url(//" in text:
            yield f"{file.relative_to(site)}: loads from another host"


def _is_here(target: str) -> bool:
    parts = urlsplit(target)
    return not parts.scheme and not parts.netloc


def _broken(site: Path, page: str, target: str) -> str:
    url = urlsplit(urljoin(HERE + page, target))
    file = site / unquote(url.path).lstrip("/")
    if file.is_dir():
        file /= "index.html"
    if not file.is_file():
        return f"the link to {target} leads nowhere"
    if url.fragment and file.suffix == ".html" and unquote(url.fragment) not in read(file).ids:
        return f"the link to {target} leads to no anchor"
    return ""
