"""The addresses of the services, and their sources."""

from collections.abc import Callable
from pathlib import Path

import pytest

from seqgate.cli._failure import InvalidSettings
from seqgate.cli._settings import Setting, resolve
from tests.cli.command_line import CommandLine, Ended

CONFIG = """
current = "dev"

[contexts.dev]
ledger = "dev-ledger:1"
dedup = "dev-dedup:1"
cursor = "dev-cursor:1"
dispatcher = "dev-dispatcher:1"
filter = "dev-filter:1"

[contexts.half]
ledger = "half-ledger:1"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"SEQGATE_CONFIG": str(write(tmp_path / "config.toml", CONFIG))}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_services_default_to_this_machine(tmp_path: Path) -> None:
    settings = resolve({"XDG_CONFIG_HOME": str(tmp_path)})

    assert settings.ledger == Setting("127.0.0.1:7702", "default")
    assert settings.dedup == Setting("127.0.0.1:7701", "default")
    assert settings.cursor == Setting("127.0.0.1:7703", "default")
    assert settings.dispatcher == Setting("127.0.0.1:7704", "default")
    assert settings.filter == Setting("127.0.0.1:7705", "default")
    assert settings.context is None
    assert settings.timeout_s == 30


def test_an_option_wins_over_the_environment_over_the_context_over_the_default(
    environment: dict[str, str],
) -> None:
    named = {**environment, "SEQGATE_LEDGER": "named:1"}

    assert resolve(named, ledger="given:1").ledger == Setting("given:1", "--ledger")
    assert resolve(named).ledger == Setting("named:1", "SEQGATE_LEDGER")
    assert resolve(named).dedup == Setting("dev-dedup:1", "context dev")
    assert resolve(environment).ledger == Setting("dev-ledger:1", "context dev")
    assert resolve(environment, context="half").ledger.value == "half-ledger:1"
    assert resolve(environment, context="half").dedup == Setting("127.0.0.1:7701", "default")
    assert resolve(environment, dedup="given:1").dedup == Setting("given:1", "--dedup")
    assert resolve(environment, cursor="given:1").cursor == Setting("given:1", "--cursor")
    assert resolve(environment).cursor == Setting("dev-cursor:1", "context dev")
    by_name = {**environment, "SEQGATE_CURSOR": "named:1"}
    assert resolve(by_name).cursor == Setting("named:1", "SEQGATE_CURSOR")
    by_option = resolve(environment, dispatcher="given:1")
    assert by_option.dispatcher == Setting("given:1", "--dispatcher")
    assert resolve(environment).dispatcher == Setting("dev-dispatcher:1", "context dev")
    by_name = {**environment, "SEQGATE_DISPATCHER": "named:1"}
    assert resolve(by_name).dispatcher == Setting("named:1", "SEQGATE_DISPATCHER")
    assert resolve(environment, filter="given:1").filter == Setting("given:1", "--filter")
    assert resolve(environment).filter == Setting("dev-filter:1", "context dev")
    by_name = {**environment, "SEQGATE_FILTER": "named:1"}
    assert resolve(by_name).filter == Setting("named:1", "SEQGATE_FILTER")


def test_a_context_is_chosen_by_option_then_environment_then_file(
    environment: dict[str, str],
) -> None:
    named = {**environment, "SEQGATE_CONTEXT": "half"}

    assert resolve(named, context="dev").context == Setting("dev", "--context")
    assert resolve(named).context == Setting("half", "SEQGATE_CONTEXT")
    assert resolve(environment).context == Setting("dev", environment["SEQGATE_CONFIG"])


def test_an_empty_variable_counts_as_unset(environment: dict[str, str]) -> None:
    empty = {**environment, "SEQGATE_LEDGER": "", "SEQGATE_DEDUP": "", "SEQGATE_CONTEXT": ""}

    assert resolve(empty) == resolve(environment)


def test_the_config_file_is_searched_in_three_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    at_home = write(tmp_path / "home/.config/seqgate/config.toml", "")
    in_xdg = write(tmp_path / "xdg/seqgate/config.toml", "")
    given = write(tmp_path / "given.toml", "")
    xdg = {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}

    assert resolve({}).config.path == at_home
    assert resolve({"XDG_CONFIG_HOME": "relative"}).config.path == at_home
    assert resolve(xdg).config.path == in_xdg
    assert resolve({**xdg, "SEQGATE_CONFIG": str(given)}).config.path == given


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("currnt = 'dev'", "unknown key currnt"),
        ("[contexts.dev]\nleger = 'a:1'", "unknown key contexts.dev.leger"),
        ("[contexts.dev]\nledger = 7702", "contexts.dev.ledger must be a string"),
        ("contexts = 'dev'", "contexts must be tables"),
        ("contexts = ['dev']", "contexts must be tables"),
        ("[contexts]\ndev = 'a:1'", "contexts must be tables"),
        ("current = 'prod'", "context 'prod' not found"),
        ("current = ['prod']", "context .* not found"),
        ("current = ''", "context '' not found"),
        ("current", "Expected '='"),
        ("\xff", "utf-8"),
    ],
)
def test_an_invalid_file_is_refused_by_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(text.encode("latin-1"))

    with pytest.raises(InvalidSettings, match=message) as refused:
        resolve({"SEQGATE_CONFIG": str(path)})

    assert str(path) in str(refused.value)


def test_an_unknown_context_names_the_file(environment: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match=environment["SEQGATE_CONFIG"]):
        resolve(environment, context="prod")
    with pytest.raises(InvalidSettings, match=str(tmp_path / "seqgate/config.toml")):
        resolve({"XDG_CONFIG_HOME": str(tmp_path), "SEQGATE_CONTEXT": "prod"})


def test_an_explicit_file_must_exist(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    with pytest.raises(InvalidSettings, match=str(missing)):
        resolve({"SEQGATE_CONFIG": str(missing)})
    with pytest.raises(InvalidSettings, match="Is a directory"):
        resolve({"SEQGATE_CONFIG": str(tmp_path)})


@pytest.mark.parametrize(
    "target",
    ["localhost:1", "127.0.0.1:65535", "[::1]:7702", "dns:///ledger:7702", "unix:/run/ledger"],
)
def test_valid_addresses_are_accepted(tmp_path: Path, target: str) -> None:
    assert resolve({"XDG_CONFIG_HOME": str(tmp_path)}, ledger=target).ledger.value == target


@pytest.mark.parametrize(
    "target", ["localhost", ":7702", "localhost:", "localhost:0", "localhost:65536", "::1", "a:b"]
)
def test_an_invalid_address_names_its_source(environment: dict[str, str], target: str) -> None:
    with pytest.raises(InvalidSettings, match="--ledger"):
        resolve(environment, ledger=target)
    with pytest.raises(InvalidSettings, match="SEQGATE_DEDUP"):
        resolve({**environment, "SEQGATE_DEDUP": target})


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, 86_401.0, float("nan"), float("inf")])
def test_a_time_limit_has_bounds(environment: dict[str, str], timeout_s: float) -> None:
    with pytest.raises(InvalidSettings, match="--timeout"):
        resolve(environment, timeout_s=timeout_s)


def test_contexts_are_listed_and_the_one_in_effect_is_marked(
    inside: Callable[..., Ended], environment: dict[str, str]
) -> None:
    table = inside("context", "ls", "--context", "half", **environment)
    listed = inside("-o", "json", "context", "ls", **environment)

    assert table.code == 0
    assert table.rows == [
        ["CURRENT", "CONTEXT", "LEDGER", "DEDUP", "CURSOR", "DISPATCHER", "FILTER"],
        [
            *("-", "dev", "dev-ledger:1", "dev-dedup:1", "dev-cursor:1", "dev-dispatcher:1"),
            "dev-filter:1",
        ],
        ["*", "half", "half-ledger:1", "-", "-", "-", "-"],
    ]
    assert listed.records == [
        {
            "context": "dev",
            "current": True,
            "ledger": "dev-ledger:1",
            "dedup": "dev-dedup:1",
            "cursor": "dev-cursor:1",
            "dispatcher": "dev-dispatcher:1",
            "filter": "dev-filter:1",
        },
        {
            "context": "half",
            "current": False,
            "ledger": "half-ledger:1",
            "dedup": None,
            "cursor": None,
            "dispatcher": None,
            "filter": None,
        },
    ]


def test_settings_in_effect_are_shown_with_their_sources(
    inside: Callable[..., Ended], environment: dict[str, str]
) -> None:
    variables = {**environment, "SEQGATE_DEDUP": "named:1"}

    table = inside("--ledger", "first:1", "context", "show", "--ledger", "second:1", **variables)
    shown = inside("context", "-o", "json", "--context=half", "show", **variables)

    assert table.rows == [
        ["SETTING", "VALUE", "SET BY"],
        ["config", environment["SEQGATE_CONFIG"], "SEQGATE_CONFIG"],
        ["context", "dev", environment["SEQGATE_CONFIG"]],
        ["ledger", "second:1", "--ledger"],
        ["dedup", "named:1", "SEQGATE_DEDUP"],
        ["cursor", "dev-cursor:1", "context dev"],
        ["dispatcher", "dev-dispatcher:1", "context dev"],
        ["filter", "dev-filter:1", "context dev"],
    ]
    assert shown.record == {
        "config": environment["SEQGATE_CONFIG"],
        "config_exists": True,
        "context": {"value": "half", "source": "--context"},
        "ledger": {"value": "half-ledger:1", "source": "context half"},
        "dedup": {"value": "named:1", "source": "SEQGATE_DEDUP"},
        "cursor": {"value": "127.0.0.1:7703", "source": "default"},
        "dispatcher": {"value": "127.0.0.1:7704", "source": "default"},
        "filter": {"value": "127.0.0.1:7705", "source": "default"},
    }


async def test_an_invalid_file_exits_every_command_with_2(
    bare: CommandLine, tmp_path: Path
) -> None:
    path = write(tmp_path / "wrong.toml", "colour = 'blue'")

    ended = await bare.with_(SEQGATE_CONFIG=str(path))("topic", "ls", "-o", "json")

    assert ended.code == 2
    assert ended.error == {
        "reason": "INVALID_SETTINGS",
        "message": f"{path}: unknown key colour",
        "details": {},
    }
