"""The help and the refusals of a service's command line."""

from pathlib import Path
from typing import Any

import pytest

from seqgate.extras import pip_install
from seqgate.services.cursor.config import CursorConfig
from seqgate.services.dedup.config import DedupConfig
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.extra import require_services
from seqgate.services.filter.config import FilterConfig
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.runtime.config import ServiceConfig
from seqgate.services.runtime.process import run_service
from seqgate.services.runtime.usage import WIDTH, faults, usage

CONFIGS: list[type[ServiceConfig]] = [
    LedgerConfig,
    DedupConfig,
    CursorConfig,
    DispatcherConfig,
    FilterConfig,
]


async def never(config: Any) -> None:
    raise AssertionError("it runs")


@pytest.mark.parametrize("config", CONFIGS)
def test_help_describes_every_setting(config: type[ServiceConfig]) -> None:
    paragraphs = usage(config).split("\n\nSEQGATE_")[1:]
    prefix = f"{config.service.upper()}_"
    assert [each.partition("  (")[0] for each in paragraphs] == [
        prefix + name.upper() for name in config.model_fields
    ]
    for each in paragraphs:
        head, _, description = each.partition("\n")
        assert "; default: " in head
        assert description.strip(), head


@pytest.mark.parametrize("config", CONFIGS)
def test_help_fits_a_screen_of_a_hundred_columns(config: type[ServiceConfig]) -> None:
    assert max(map(len, usage(config).splitlines())) <= WIDTH


@pytest.mark.parametrize(
    "line",
    [
        "SEQGATE_LEDGER_LISTEN  (text; default: 127.0.0.1:7702)",
        "SEQGATE_LEDGER_REFLECTION  (true | false; default: false)",
        "SEQGATE_LEDGER_DRAIN_TIMEOUT_S  (seconds, > 0, <= 86400; default: 20)",
        "SEQGATE_LEDGER_MESSAGE_BYTES_MAX  (bytes, >= 65536, <= 268435456; default: 16777216)",
        "SEQGATE_LEDGER_STORE_READERS  (number, >= 1, <= 64; default: 2)",
        "SEQGATE_LEDGER_STORE_PATH  (path; default: ledger.db)",
        "SEQGATE_LEDGER_TLS_KEY_FILE  (path; default: none)",
        "SEQGATE_LEDGER_LOG_FORMAT  (auto | json | text; default: auto)",
        'SEQGATE_LEDGER_AUTO_CREATE  (JSON list; default: ["*/*"])',
    ],
)
def test_help_shows_unit_bounds_and_default(line: str) -> None:
    assert line in usage(LedgerConfig).splitlines()


def test_help_is_printed_and_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEQGATE_LEDGER_WINDOW_MESSAGES", "many")  # whatever the settings
    assert run_service(LedgerConfig, never, ["--help"]) == 0
    assert capsys.readouterr() == (usage(LedgerConfig), "")


@pytest.mark.parametrize("argument", ["--port", "-h", "run", ""])
def test_an_unknown_argument_is_an_error(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_service(LedgerConfig, never, [argument]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith(f"ledger: unknown argument {argument!r}; ")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("SEQGATE_LEDGER_WINDOW_MESAGES", "did you mean SEQGATE_LEDGER_WINDOW_MESSAGES?"),
        ("seqgate_ledger_window_mesages", "did you mean SEQGATE_LEDGER_WINDOW_MESSAGES?"),
        ("SEQGATE_LEGDER_LISTEN", "did you mean SEQGATE_LEDGER_LISTEN?"),
        ("SEQGATE_LEDGER_", "--help lists the settings"),
        ("SEQGATE_RUNTIMES", "--help lists the settings"),
    ],
)
def test_an_unknown_variable_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, remedy: str
) -> None:
    monkeypatch.setenv(name, "1")
    assert run_service(LedgerConfig, never) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith(f"ledger: unknown setting {name}; ")
    assert error.endswith(f"{remedy}\n")


@pytest.mark.parametrize(
    "name",
    [
        "SEQGATE_LEDGER_LISTEN",
        "seqgate_ledger_listen",
        "SEQGATE_LEDGER_CONFIG_FILE",
        "SEQGATE_LEDGER",  # the command line's
        "SEQGATE_DEDUP",
        "SEQGATE_TOKEN_FILE",
        "SEQGATE_DEDUP_LISTEN",  # another service's
        "SEQGATE_TEST_SEED",
        "SEQGATES",
        "PATH",
    ],
)
def test_known_and_foreign_variables_are_accepted(name: str) -> None:
    assert not list(faults(LedgerConfig, (), [name]))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WINDOW_MESSAGES", "many", "input should be a valid integer, unable to parse string"),
        ("WINDOW_MESSAGES", "0", "input should be greater than or equal to 1"),
        ("LISTEN", "nowhere", "must be host:port"),
    ],
)
def test_a_wrong_value_is_a_line_without_the_value(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    said: str,
) -> None:
    monkeypatch.setenv(f"SEQGATE_LEDGER_{name}", value)
    assert run_service(LedgerConfig, never) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith(f"ledger: SEQGATE_LEDGER_{name}: ")
    assert said in error


def test_a_misspelt_argument_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    for config, remedy in (
        (LedgerConfig, "did you mean --migrate?"),
        (DedupConfig, "python -m seqgate.services.dedup --help lists the settings"),
    ):
        assert run_service(config, never, ["--migrat"]) == 2
        service = config.service
        assert capsys.readouterr().err == f"{service}: unknown argument '--migrat'; {remedy}\n"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LedgerConfig, "DEDUP_TARGET"),
        (LedgerConfig, "CURSOR_TARGET"),
        (DedupConfig, "CURSOR_TARGET"),
        (DispatcherConfig, "LEDGER_TARGET"),
        (DispatcherConfig, "CURSOR_TARGET"),
        (DispatcherConfig, "FILTER_TARGET"),
    ],
)
def test_a_target_is_an_address_with_a_port(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: type[ServiceConfig],
    name: str,
) -> None:
    variable = f"SEQGATE_{config.service.upper()}_{name}"
    for right in ("a:1", "[::1]:1", "dns:///a:1", "dns://1.1.1.1/a:1", "ipv4:1.2.3.4:1,5.6.7.8:1"):
        monkeypatch.setenv(variable, right)
        assert getattr(config(), name.lower()) == right
    for wrong in ("a", "a:b", "dns:///a", "a:1,b", "http://a:1", "ipv4:1.2.3.4"):
        monkeypatch.setenv(variable, wrong)
        assert run_service(config, never) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{config.service}: {variable}: must be host:port")


def test_a_password_in_a_wrong_value_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEQGATE_DEDUP_REDIS_URL", "http://:hunter2@redis")
    assert run_service(DedupConfig, never) == 2
    error = capsys.readouterr().err
    assert error.startswith("dedup: SEQGATE_DEDUP_REDIS_URL: ")
    assert "hunter2" not in error


def test_an_unknown_key_of_the_file_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "ledger.toml").write_text("window_mesages = 5\n")
    monkeypatch.setenv("SEQGATE_LEDGER_CONFIG_FILE", str(tmp_path / "ledger.toml"))
    assert run_service(LedgerConfig, never) == 2
    assert capsys.readouterr().err == (
        "ledger: unknown key 'window_mesages' in the file that SEQGATE_LEDGER_CONFIG_FILE names; "
        "did you mean window_messages?\n"
    )


def test_a_service_without_its_extra_names_the_command_to_install_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        require_services(ModuleNotFoundError("No module named 'apsw'", name="apsw"))
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"a service needs the packages of an extra (apsw is missing): {pip_install('services')}\n"
    )
    with pytest.raises(ModuleNotFoundError):
        require_services(ModuleNotFoundError("no", name="seqgate.services.ledger.live"))
