"""The benchmarks' page: every figure, beside its limit and with its price."""

from html.parser import HTMLParser
from typing import Any

import pytest

from tools.bench.page import page

VOID = {"meta", "rect", "line"}


def figure(name: str, **more: Any) -> dict[str, Any]:
    values = {"value": 1_200.0, "min": 1_100.0, "max": 1_300.0, "unit": "messages/s"}
    return {"group": "publish", "name": name, "limit": None, "ratio": None, **values, **more}


def report(*measurements: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": "2026-11-01",
        "command": "make bench",
        "machine": {"cpus": 2, "kernel": "6.1 <x>"},
        "left_out": ["a peer: <program> is missing"],
        "measurements": list(measurements),
    }


class Balanced(HTMLParser):
    """Checks that every element is closed in order, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def read(html: str) -> str:
    parser = Balanced()
    parser.feed(html)
    assert parser.open == []
    return parser.text


def test_a_figure_is_shown_with_its_limit_and_its_price() -> None:
    limit = {"name": "null ledger <fast>", "value": 1_500.0}
    prices = {"client": 20.0, "ledger-1": 10.5, "someone": 0.0}
    html = page(report(figure("a & b", limit=limit, ratio=0.8, cpu_us=prices), figure("alone")))
    text = read(html)
    assert "a & b" in text
    assert "80% of 1,500: null ledger <fast>" in text
    assert "30.5 µs: client 20, ledger-1 10.5, someone 0" in text
    assert "1,200 messages/s" in text
    assert "6.1 <x>" in text
    assert html.count('class="limit"') == 1


@pytest.mark.parametrize(
    ("ratio", "width", "line"),
    [(0.0, 0.0, 192.0), (0.5, 96.0, 192.0), (1.25, 240.0, 192.0), (4.0, 240.0, 60.0)],
)
def test_bar_and_line_stand_in_the_ratio_of_figure_and_limit(
    ratio: float, width: float, line: float
) -> None:
    limit = {"name": "slow", "value": 1.0}
    html = page(report(figure("a", limit=limit, ratio=ratio)))
    assert f'class="value" width="{width}"' in html
    assert f'class="limit" x1="{line}" x2="{line}"' in html


def test_what_was_left_out_is_told() -> None:
    assert "Left out: a peer: <program> is missing." in read(page(report(figure("one"))))


def test_groups_are_apart() -> None:
    text = read(page(report(figure("one"), {**figure("two"), "group": "read"})))
    assert text.index("publish") < text.index("one") < text.index("read\n") < text.index("two")
