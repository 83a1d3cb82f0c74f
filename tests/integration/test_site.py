"""The documentation as a site: it is complete, and a browser reads every page of it."""

import re
from pathlib import Path

import pytest
import typer

from seqgate import client, errors, spark
from seqgate.cli import _main
from seqgate.telemetry import metrics
from tests.support import browser
from tests.support.depth import some_of
from tools.dev.errors import PAGE as ERRORS
from tools.site import checks, navigation, tree
from tools.site.reference import command_line, protos, python, settings


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert tree.build(folder / "work", folder / "site") == []
    return folder / "site"


def text(site: Path, page: str) -> str:
    return checks.read(site / page / "index.html").text


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert list(checks.faults(site)) == []


def test_the_navigation_leads_to_every_page(site: Path) -> None:
    start = site / "start"
    links = {(start / link).resolve() for link in checks.read(start / "index.html").links}
    for page in navigation.pages():
        folder = site / page.removesuffix("README").removesuffix("index")
        assert folder.resolve() in links, page


async def test_a_browser_reads_every_page_and_finds_key_shared(site: Path, tmp_path: Path) -> None:
    files = sorted(site.rglob("*.html"))
    every = [file.relative_to(site).as_posix().removesuffix("index.html") for file in files]
    assert len(every) > len(list(navigation.pages()))
    seen = await browser.read(site, some_of(every, every=8), tmp_path, search="KEY_SHARED")
    assert seen.faults == []
    assert "/guides/key-order/" in seen.found[:3]


async def test_the_browser_notices_what_is_wrong_with_a_page(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "throws.html").write_text("<h1>x</h1><script>throw new Error('no')</script>")
    (bad / "complains.html").write_text("<h1>x</h1><script>console.error('no')</script>")
    (bad / "lacks.html").write_text("<h1>x</h1><img src='gone.png'>")
    (bad / "calls.html").write_text("<h1>x</h1><script src='http://127.0.0.1:9/x.js'></script>")
    (bad / "empty.html").write_text("<p>x</p>")
    (bad / "good.html").write_text("<link rel=icon href=data:,><h1>x</h1>")
    pages = sorted(each.name for each in bad.iterdir())
    seen = await browser.read(bad, pages, tmp_path / "profile")
    faults = {page: [fault for at, fault in seen.faults if at == page] for page in pages}
    assert faults["good.html"] == []
    assert all(faults[page] for page in pages if page != "good.html")
    assert any("127.0.0.1:9" in each for each in faults["calls.html"])
    assert "has no heading" in faults["empty.html"]


def test_every_command_and_option_is_in_the_reference(site: Path) -> None:
    shown = text(site, "reference/cli")
    found = list(command_line.commands(typer.main.get_command(_main.app), "seqgate"))
    assert len(found) > 40
    for path, command in found:
        assert path in shown
        for parameter in command.params:
            for flag in parameter.opts if parameter.param_type_name == "option" else ():
                assert flag in shown or flag in ("--help", "-h")


def test_every_setting_is_in_the_reference_with_a_meaning(site: Path) -> None:
    shown = text(site, "reference/settings")
    for service in metrics.PROCESSES:
        fields = settings.config_type(service).model_fields
        for variable, name in zip(settings.variables(service), fields, strict=True):
            common = f"SEQGATE_<SERVICE>_{name.upper()}"
            assert f"{variable}¶" in shown or f"{common}¶" in shown
            assert settings.meaning(service, name)


def test_every_rpc_message_and_field_is_in_the_reference(site: Path) -> None:
    shown = text(site, "reference/protos")
    files = protos.files()
    rpcs = [f"rpc {s.name}.{m.name}" for f in files for s in f.service for m in s.method]
    assert len(rpcs) > 40
    for rpc in rpcs:
        assert f"{rpc}¶" in shown
    for file in files:
        for message in file.message_type:
            assert f"message {message.name}¶" in shown
            for field in message.field:
                assert f"{field.name} = {field.number}" in shown


def test_every_metric_is_in_the_reference(site: Path) -> None:
    shown = text(site, "reference/metrics")
    for metric in metrics.CATALOGUE:
        assert f"{metric.prometheus}¶" in shown


def test_every_reason_is_in_the_reference(site: Path) -> None:
    shown = text(site, "errors")
    reasons = re.findall(r"^### (\w+)$", ERRORS.read_text(), re.MULTILINE)
    assert len(reasons) > 80
    for reason in reasons:
        assert f"{reason}¶" in shown


def test_every_name_of_the_python_api_is_in_the_reference(site: Path) -> None:
    shown = text(site, "reference/python")
    raised = [name for name, each in vars(errors).items() if isinstance(each, type)]
    ours = [name for name in raised if getattr(errors, name).__module__ == errors.__name__]
    for name in (*client.__all__, *spark.__all__, *ours):
        assert f"{name}¶" in shown
    for module in python.modules(python.load()):
        for name in python.names(module):
            assert f"{name}¶" in shown
    for owner in ("Producer", "Admin"):
        found = python.load()["client"][owner].final_target
        for name, each in found.all_members.items():
            if each.is_function and not name.startswith("_"):
                assert f"{owner}.{name}¶" in shown


def test_no_page_is_empty(site: Path) -> None:
    for page in navigation.pages():
        file = site / page.removesuffix("README").removesuffix("index") / "index.html"
        assert len(checks.read(file).text.split()) > 200, page
