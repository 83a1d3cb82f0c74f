"""The pages of the site, in the order of its navigation, and the files that they come from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

Item = tuple[str, "str | tuple[Item, ...]"]
"""A title, and a page, without its suffix, or the items of a section."""

NAVIGATION: Final[tuple[Item, ...]] = (
    ("Seqgate", "index"),
    ("Start", "start"),
    ("Concepts", "concepts"),
    (
        "Guides",
        (
            ("Exactly once", "guides/exactly-once"),
            ("Key order", "guides/key-order"),
            ("Redrives and replays", "guides/redrives"),
            ("Filters", "guides/filters"),
            ("Large messages", "guides/large-messages"),
            ("Recovery", "guides/recovery"),
            ("PostgreSQL", "guides/postgresql"),
            ("Kubernetes", "guides/kubernetes"),
            ("Security", "guides/security"),
            ("Observability", "guides/observability"),
            ("The life of a message", "guides/message-life"),
            ("Console", "guides/console"),
            ("Spark", "guides/spark"),
            ("Without asyncio", "guides/blocking"),
            ("From Node", "guides/node"),
            ("Coming from Pulsar, Kafka or NATS", "guides/coming-from"),
        ),
    ),
    (
        "Reference",
        (
            ("Python", "reference/python"),
            ("Command line", "reference/cli"),
            ("Settings", "reference/settings"),
            ("Protos", "reference/protos"),
            ("Errors", "errors"),
            ("Metrics", "reference/metrics"),
            ("Memory budgets", "budgets"),
        ),
    ),
    (
        "Design",
        (
            ("Guarantees", "guarantees"),
            ("Architecture", "architecture"),
            ("Decisions", "decisions/README"),
            ("Benchmarks", "benchmarks/README"),
            ("Style", "style"),
            ("Changelog", "changelog"),
        ),
    ),
)

FOLDER: Final = "docs"

ELSEWHERE: Final = {
    "ARCHITECTURE.md": "architecture",
    "CHANGELOG.md": "changelog",
    "README.md": "index",
    "STYLE.md": "style",
    "deploy/k8s/README.md": "guides/kubernetes",
    "examples/node/README.md": "guides/node",
    "protos/seqgate/api": "reference/protos",
    "seqgate/spark/__init__.py": "reference/python",
}
"""Files and folders outside docs, and the pages that have or replace them."""

REPLACED: Final = frozenset({"README.md", "protos/seqgate/api", "seqgate/spark/__init__.py"})
"""Those of ELSEWHERE that have no page of their own: another page says the same."""

UNLISTED: Final = ("decisions/", "source/")
"""Folders of pages that other pages lead to."""


def pages(items: tuple[Item, ...] = NAVIGATION) -> Iterator[str]:
    for _, page in items:
        if isinstance(page, str):
            yield page
        else:
            yield from pages(page)


def as_configured(items: tuple[Item, ...] = NAVIGATION) -> list[dict[str, object]]:
    """The navigation in the generator's form."""
    return [
        {title: f"{page}.md" if isinstance(page, str) else as_configured(page)}
        for title, page in items
    ]


def faults(written: Path) -> Iterator[str]:
    listed = list(pages())
    for page in listed:
        if not (written / f"{page}.md").exists():
            yield f"the navigation lists {page}, which does not exist"
    for file in sorted(written.rglob("*.md")):
        page = file.relative_to(written).with_suffix("").as_posix()
        if page not in listed and not page.startswith(UNLISTED):
            yield f"{page} is not in the navigation"
