"""tools/site: what is wrong with a site is found."""

from pathlib import Path

import pytest

from tools.site import checks, navigation, tree

MD = ".md"
"""Split, so that tools/dev/documents.py does not check the names in this file."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A small site without faults."""
    (tmp_path / "guide").mkdir()
    (tmp_path / "index.html").write_text('<a href="guide/#two">x</a><a href="https://a.example">')
    (tmp_path / "guide" / "index.html").write_text('<h2 id="two">x</h2><a href="../">y</a>')
    (tmp_path / "site.css").write_text("a { background: url(data:,) }")
    return tmp_path


def test_a_site_without_faults_passes(site: Path) -> None:
    assert list(checks.faults(site)) == []


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ('<a href="gone/">', "the link to gone/ leads nowhere"),
        ('<a href="/guide/#three">', "the link to /guide/#three leads to no anchor"),
        ('<a href="#here">', "the link to #here leads to no anchor"),
        ('<img src="gone.png">', "the link to gone.png leads nowhere"),
        ('<script src="https://a.example/a.js">', "loads https://a.example/a.js"),
        ('<link rel="stylesheet" href="//a.example/a.css">', "loads //a.example/a.css"),
    ],
)
def test_a_faulty_page_is_found(site: Path, html: str, fault: str) -> None:
    (site / "index.html").write_text(html)
    assert list(checks.faults(site)) == [f"index.html: {fault}"]


@pytest.mark.parametrize("css", ["@import 'a.css';", "a { background: url(https://a.example/) }"])
def test_a_style_that_loads_from_elsewhere_is_found(site: Path, css: str) -> None:
    (site / "site.css").write_text(css)
    assert list(checks.faults(site)) == ["site.css: loads from another host"]


def test_a_missing_page_and_one_that_nothing_lists_are_found(tmp_path: Path) -> None:
    tree.gather(tmp_path)
    assert list(navigation.faults(tmp_path)) == []
    (tmp_path / f"start{MD}").rename(tmp_path / f"begin{MD}")
    assert list(navigation.faults(tmp_path)) == [
        "the navigation lists start, which does not exist",
        "begin is not in the navigation",
    ]


def test_the_navigation_is_in_the_generators_form() -> None:
    items = (("Seqgate", "index"), ("Guides", (("Start", "start"),)))
    assert navigation.as_configured(items) == [
        {"Seqgate": f"index{MD}"},
        {"Guides": [{"Start": f"start{MD}"}]},
    ]
