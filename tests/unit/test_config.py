"""The sources of settings, and the settings refused."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from seqgate.services.cursor.config import CursorConfig
from seqgate.services.dedup.config import DedupConfig
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.filter.config import FilterConfig
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.runtime.config import ServiceConfig
from seqgate.services.runtime.process import COLLECTED_OBJECTS, run_service

FILE = "SEQGATE_LEDGER_CONFIG_FILE"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove settings from the environment of the test run."""
    for config in (LedgerConfig, DedupConfig, CursorConfig, DispatcherConfig):
        for name in (*config.model_fields, "config_file"):
            monkeypatch.delenv(f"SEQGATE_{config.service}_{name}".upper(), raising=False)


def ledger_with(monkeypatch: pytest.MonkeyPatch, **environment: str) -> LedgerConfig:
    for name, value in environment.items():
        monkeypatch.setenv(f"SEQGATE_LEDGER_{name}".upper(), value)
    return LedgerConfig()


@pytest.mark.parametrize(
    ("config", "listen"),
    [
        (LedgerConfig, "127.0.0.1:7702"),
        (DedupConfig, "127.0.0.1:7701"),
        (CursorConfig, "127.0.0.1:7703"),
        (DispatcherConfig, "127.0.0.1:7704"),
    ],
)
def test_a_service_without_settings_listens_only_locally(
    config: type[ServiceConfig], listen: str
) -> None:
    assert config().listen == listen


@pytest.mark.parametrize(
    ("environment", "file", "window"),
    [
        (None, None, 20_000),
        (None, "7", 7),
        ("8", None, 8),
        ("8", "7", 8),  # the environment comes before the file
    ],
)
def test_a_setting_is_taken_from_the_nearest_source(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    environment: str | None,
    file: str | None,
    window: int,
) -> None:
    if environment is not None:
        monkeypatch.setenv("SEQGATE_LEDGER_WINDOW_MESSAGES", environment)
    if file is not None:
        (tmp_path / "ledger.toml").write_text(f"window_messages = {file}\n")
        monkeypatch.setenv(FILE, str(tmp_path / "ledger.toml"))
    assert LedgerConfig().window_messages == window


def test_sources_are_merged_setting_by_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "ledger.toml"
    file.write_text(
        'listen = "0.0.0.0:1"\nauto_create = ["acme/*", "*/dev"]\nlog_level = "debug"\n'
    )
    monkeypatch.setenv(FILE, str(file))
    config = ledger_with(monkeypatch, log_level="error", store_path="data/ledger.db")
    assert config.listen == "0.0.0.0:1"
    assert config.auto_create == ("acme/*", "*/dev")
    assert config.log_level == "error"
    assert config.store_path == Path("data/ledger.db")
    assert config.log_format == "auto"


def test_a_list_in_the_environment_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ledger_with(monkeypatch, auto_create='["a/b", "c/*"]').auto_create == ("a/b", "c/*")
    assert ledger_with(monkeypatch, auto_create="[]").auto_create == ()


def test_each_service_has_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQGATE_DEDUP_LISTEN", "0.0.0.0:1")
    monkeypatch.setenv("SEQGATE_DEDUP_REDIS_URL", "redis://there:1/0")
    assert LedgerConfig().listen == "127.0.0.1:7702"
    assert DedupConfig().redis_url == "redis://there:1/0"


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("message_bytes_max", 64 * 1024, 256 * 1024 * 1024),
        ("metadata_bytes_max", 1024, 1024 * 1024),
        ("keepalive_s", 1, 7200),
        ("store_readers", 1, 64),
        ("max_message_bytes", 1024, 128 * 1024 * 1024),
        ("window_messages", 1, 1_000_000),
        ("window_bytes", 1024, 1024 * 1024 * 1024),
        ("publish_streams_max", 1, 100_000),
        ("read_streams_max", 1, 100_000),
        ("read_bytes_max", 64 * 1024, 64 * 1024**3),
        ("group_entries_max", 1, 4_000),
        ("group_bytes_max", 1024, 256 * 1024 * 1024),
        ("failures_max", 1, 1_000),
    ],
)
def test_numbers_are_bounded(
    monkeypatch: pytest.MonkeyPatch, name: str, least: int, most: int
) -> None:
    for right in (least, most):
        assert getattr(ledger_with(monkeypatch, **{name: str(right)}), name) == right
    for wrong in (least - 1, most + 1, -1):
        with pytest.raises(ValidationError, match=name):
            ledger_with(monkeypatch, **{name: str(wrong)})


@pytest.mark.parametrize(
    "name",
    [
        "drain_timeout_s",
        "stop_grace_s",
        "health_interval_s",
        "dedup_timeout_s",
        "open_timeout_s",
        "follow_poll_s",
        "keep_interval_s",
        "idle_timeout_s",
        "slow_reader_s",
    ],
)
def test_durations_are_above_zero_and_at_most_a_day(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for right in ("0.001", "86400"):
        assert getattr(ledger_with(monkeypatch, **{name: right}), name) == float(right)
    for wrong in ("0", "-1", "86401", "inf", "nan", "soon", ""):
        with pytest.raises(ValidationError, match=name):
            ledger_with(monkeypatch, **{name: wrong})


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("lease_s", 0.3, 3_600),
        ("read_entries_max", 1, 10_000),
        ("key_parked_max", 1, 1_000_000),
        ("consumer_parked_max", 1, 10_000_000),
        ("delayed_max", 1, 1_000_000),
        ("delayed_bytes_max", 1, 16 * 1024 * 1024 * 1024),
        ("all_delayed_bytes_max", 1, 64 * 1024 * 1024 * 1024),
        ("cache_bytes_max", 0, 16 * 1024 * 1024 * 1024),
        ("consumers_max", 1, 10_000),
        ("subscriptions_max", 1, 100_000),
    ],
)
def test_numbers_of_the_dispatcher_are_bounded(
    monkeypatch: pytest.MonkeyPatch, name: str, least: float, most: float
) -> None:
    for right in (least, most):
        monkeypatch.setenv(f"SEQGATE_DISPATCHER_{name}".upper(), str(right))
        assert getattr(DispatcherConfig(), name) == right
    for wrong in (least - 1, most + 1):
        monkeypatch.setenv(f"SEQGATE_DISPATCHER_{name}".upper(), str(wrong))
        with pytest.raises(ValidationError, match=name):
            DispatcherConfig()


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("programs_max", 1, 1_000_000),
        ("program_bytes_max", 1024 * 1024, 16 * 1024 * 1024 * 1024),
        ("decisions_max", 0, 100_000_000),
        ("decision_bytes_max", 0, 64 * 1024 * 1024 * 1024),
    ],
)
def test_numbers_of_the_filter_service_are_bounded(
    monkeypatch: pytest.MonkeyPatch, name: str, least: int, most: int
) -> None:
    for right in (least, most):
        monkeypatch.setenv(f"SEQGATE_FILTER_{name}".upper(), str(right))
        assert getattr(FilterConfig(), name) == right
    for wrong in (least - 1, most + 1):
        monkeypatch.setenv(f"SEQGATE_FILTER_{name}".upper(), str(wrong))
        with pytest.raises(ValidationError, match=name):
            FilterConfig()


@pytest.mark.parametrize("listen", ["0.0.0.0:7704", "[::]:7704", "127.0.0.1:0"])
def test_a_dispatcher_on_a_wildcard_address_requires_an_advertised_one(
    monkeypatch: pytest.MonkeyPatch, listen: str
) -> None:
    assert DispatcherConfig().owner == "127.0.0.1:7704"
    monkeypatch.setenv("SEQGATE_DISPATCHER_LISTEN", listen)
    with pytest.raises(ValidationError, match="advertise"):
        DispatcherConfig()
    monkeypatch.setenv("SEQGATE_DISPATCHER_ADVERTISE", "dispatcher-0.example:7704")
    assert DispatcherConfig().owner == "dispatcher-0.example:7704"


@pytest.mark.parametrize("name", ["connection_age_max_s", "store_bytes_max"])
def test_zero_means_unlimited(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert getattr(ledger_with(monkeypatch, **{name: "0"}), name) == 0
    for wrong in ("-1", "inf", "nan", "1e300"):
        with pytest.raises(ValidationError, match=name):
            ledger_with(monkeypatch, **{name: wrong})


POSTGRES_URL = "postgresql://seqgate@127.0.0.1/logs"


@pytest.mark.parametrize(("name", "value"), [("store_path", "ledger.db"), ("store_bytes_max", "9")])
@pytest.mark.parametrize("in_file", [False, True])
def test_settings_of_sqlite_are_refused_with_postgresql(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str, in_file: bool
) -> None:
    assert ledger_with(monkeypatch, postgres_url=POSTGRES_URL).postgres.url == POSTGRES_URL
    if in_file:
        file = tmp_path / "ledger.toml"
        file.write_text(f'{name} = "{value}"\n')
        monkeypatch.setenv(FILE, str(file))
    else:
        monkeypatch.setenv(f"SEQGATE_LEDGER_{name}".upper(), value)
    with pytest.raises(ValidationError, match=f"{name} .*postgres_url"):
        LedgerConfig()
    assert str(getattr(ledger_with(monkeypatch, postgres_url=""), name)) == value


@pytest.mark.parametrize(
    ("listen", "right"),
    [
        ("127.0.0.1:7702", True),
        ("0.0.0.0:0", True),
        ("[::1]:7702", True),
        ("localhost:65535", True),
        ("localhost:65536", False),
        ("localhost:123456789", False),
        ("localhost", False),
        ("localhost:", False),
        ("localhost:http", False),
        ("localhost:-1", False),
        ("localhost:\N{ARABIC-INDIC DIGIT ONE}", False),
        (":7702", False),
        ("", False),
    ],
)
def test_listen_addresses_have_a_host_and_a_port(
    monkeypatch: pytest.MonkeyPatch, listen: str, right: bool
) -> None:
    if right:
        assert ledger_with(monkeypatch, listen=listen).listen == listen
    else:
        with pytest.raises(ValidationError, match="listen"):
            ledger_with(monkeypatch, listen=listen)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("window_mesages = 1", "window_mesages"),  # misspelt
        ("window_messages = 0", "window_messages"),
        ('window_messages = "many"', "window_messages"),
        ("log_level = 'loud'", "log_level"),
        ("auto_create = 'public/default'", "auto_create"),
        ("[ledger]\nwindow_messages = 1", "ledger"),
        ("window_messages = ", "TOML|Invalid"),
    ],
)
def test_an_invalid_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, error: str
) -> None:
    (tmp_path / "ledger.toml").write_text(text)
    monkeypatch.setenv(FILE, str(tmp_path / "ledger.toml"))
    with pytest.raises(ValueError, match=error):
        LedgerConfig()


def test_a_missing_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FILE, str(tmp_path / "ledger.toml"))
    with pytest.raises(FileNotFoundError, match=r"ledger\.toml"):
        LedgerConfig()


def test_settings_are_immutable() -> None:
    config = LedgerConfig()
    with pytest.raises(ValidationError):
        config.window_messages = 1  # type: ignore[misc]


@pytest.mark.parametrize("environment", [{"WINDOW_MESSAGES": "0"}, {"CONFIG_FILE": "nowhere.toml"}])
def test_a_service_with_invalid_settings_reports_them_and_exits(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"SEQGATE_LEDGER_{name}", value)

    async def run(config: LedgerConfig) -> None:
        raise AssertionError("it runs")

    assert run_service(LedgerConfig, run) == 2
    assert capsys.readouterr().err.startswith("ledger: ")


def test_a_service_collects_garbage_rarely() -> None:
    told = _told(
        "import asyncio, gc\n"
        "from seqgate.services.filter.config import FilterConfig\n"
        "from seqgate.services.runtime.process import run_service\n"
        "async def run(config):\n"
        "    print(gc.get_threshold(), gc.get_freeze_count() > 10_000)\n"
        "raise SystemExit(run_service(FilterConfig, run))\n"
    )
    assert told.splitlines()[0] == f"{(COLLECTED_OBJECTS, 20, 50)} True"


def _told(program: str) -> str:
    """What a program prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    return done.stdout.decode()
