"""The credentials that the command line sends, and their sources."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqgate.cli._failure import InvalidSettings
from seqgate.cli._settings import Setting, resolve
from seqgate.client._channel import PLAIN
from seqgate.tls import TLS
from tests.cli.command_line import Ended

CONFIG = """
current = "dev"

[contexts.dev]
ca_file = "ca.pem"
certificate_file = "/etc/me.pem"
key_file = "me.key"
token_file = "token"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "config.toml"
    file.write_text(CONFIG)
    return {"SEQGATE_CONFIG": str(file)}


def test_no_credentials_are_sent_by_default(tmp_path: Path) -> None:
    assert resolve({"XDG_CONFIG_HOME": str(tmp_path)}).security == PLAIN


def test_files_of_a_context_are_relative_to_the_config_file(
    environment: dict[str, str], tmp_path: Path
) -> None:
    security = resolve(environment).security
    assert security.tls == TLS(tmp_path / "ca.pem", Path("/etc/me.pem"), tmp_path / "me.key")
    assert security.token == tmp_path / "token"


def test_an_option_wins_over_the_environment_over_the_context(
    environment: dict[str, str],
) -> None:
    named = {**environment, "SEQGATE_CA_FILE": "named.pem", "SEQGATE_TOKEN": "t.t.t"}
    files = resolve(named).files
    assert files["ca_file"] == Setting("named.pem", "SEQGATE_CA_FILE")
    given = resolve(named, ca_file="given.pem", token_file=None).files
    assert given["ca_file"] == Setting("given.pem", "--ca-file")
    assert given["token_file"].source == "context dev"


def test_a_token_is_read_from_the_environment_and_never_printed(
    inside: Callable[..., Ended], environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text('current = "x"\n[contexts.x]\nca_file = "ca.pem"\n')
    variables = {**environment, "SEQGATE_TOKEN": "se.cr.et"}
    assert resolve(variables).security.token == "se.cr.et"
    shown = inside("context", "show", **variables)
    assert shown.code == 0
    assert "se.cr.et" not in shown.out + shown.err
    assert ["ca_file", str(tmp_path / "ca.pem"), "context x"] in shown.rows


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"ca_file": "a", "certificate_file": "b"}, "--key-file"),
        ({"ca_file": "a", "key_file": "b"}, "given together"),
        ({"certificate_file": "a", "key_file": "b"}, "requires TLS: give --ca-file"),
    ],
)
def test_dependent_files_must_be_given_together(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidSettings, match=message):
        resolve({"XDG_CONFIG_HOME": str(tmp_path)}, **files)


def test_a_token_is_not_sent_to_another_machine_unencrypted(tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path), "SEQGATE_TOKEN": "t.t.t"}
    assert resolve(environment).security.token == "t.t.t"
    with pytest.raises(InvalidSettings, match=r"away:1 \(--cursor\) without TLS"):
        resolve(environment, cursor="away:1")
    resolve(environment, cursor="away:1", ca_file="ca.pem")


def test_a_context_with_an_invalid_file_name_is_refused(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text("[contexts.x]\nca_file = 7\n")
    with pytest.raises(InvalidSettings, match=r"contexts\.x\.ca_file must be a string, the name"):
        resolve(environment)
