"""Settings, names, tokens, files and denials, without a connection."""

import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from pydantic import ValidationError

from seqgate.services.cursor.config import CursorConfig
from seqgate.services.errors import DomainError
from seqgate.services.filter.config import FilterConfig
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.runtime.guard import PermissionDenied, record_denial
from seqgate.services.runtime.identity import NAME_CHARS_MAX, Principal, of_certificate, of_token
from seqgate.services.runtime.process import run_service
from seqgate.services.runtime.refusal_log import RefusalLog
from seqgate.services.runtime.security import OpenToEverybody, check_exposure, exposure
from seqgate.services.runtime.tokens import InvalidToken, Tokens, read_keys
from seqgate.tls import TLS, TokenSource, channel_credentials, is_loopback, of_environment
from seqgate.watched import Watched
from tests.support.authority import Authority, Issuer, replace

# ---- settings


def settings(tmp_path: Path) -> dict[str, Any]:
    """All security settings of a service."""
    return {
        "tls_certificate_file": tmp_path / "a",
        "tls_key_file": tmp_path / "b",
        "tls_client_ca_file": tmp_path / "c",
        "jwt_keys_file": tmp_path / "d",
        "jwt_audience": "seqgate",
        "jwt_issuer": "issuer",
        "access_file": tmp_path / "e",
    }


TLS_ONLY = ("tls_certificate_file", "tls_key_file")
TOKENS = ("jwt_keys_file", "jwt_audience", "jwt_issuer", "access_file")
MUTUAL = (*TLS_ONLY, "tls_client_ca_file", "access_file")


def told(tmp_path: Path, *names: str, **others: Any) -> FilterConfig:
    everything = settings(tmp_path)
    return FilterConfig(**{name: everything[name] for name in names}, **others)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["tls_certificate_file"], "must be set together"),
        (["tls_key_file"], "must be set together"),
        (["tls_client_ca_file", "access_file"], "requires tls_certificate_file"),
        (["jwt_keys_file", "access_file"], "must be set together"),
        (["jwt_audience"], "must be set together"),
        (["jwt_keys_file", "jwt_audience", "access_file"], "must be set together"),
        (["access_file"], "access_file must be set with"),
        ([*TOKENS[:3]], "access_file must be set with"),
        ([*MUTUAL[:3]], "access_file must be set with"),
    ],
)
def test_dependent_settings_must_be_set_together(
    tmp_path: Path, names: list[str], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        told(tmp_path, *names)


@pytest.mark.parametrize("names", [(), TLS_ONLY, TOKENS, MUTUAL, {*TOKENS, *MUTUAL}])
def test_complete_settings_are_accepted(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert told(tmp_path, *names).authenticates is ("access_file" in names)


@pytest.mark.parametrize(
    "given",
    [
        {"peer_certificate_file": "a", "peer_ca_file": "c"},
        {"peer_key_file": "b", "peer_ca_file": "c"},
        {"peer_certificate_file": "a", "peer_key_file": "b"},
    ],
)
def test_peer_credentials_must_be_complete(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="peer_"):
        LedgerConfig(**given)
    with pytest.raises(ValidationError, match="peer_"):
        CursorConfig(**given)


def test_a_service_without_peers_has_no_peer_settings() -> None:
    assert not [name for name in FilterConfig.model_fields if name.startswith("peer_")]


EVERYWHERE = ("0.0.0.0:1", "[::]:1", "10.0.0.1:1", "ledger.example:1")
HERE = ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1")


@pytest.mark.parametrize("listen", EVERYWHERE)
def test_an_open_service_does_not_start_unless_allowed(tmp_path: Path, listen: str) -> None:
    for names in ((), TLS_ONLY, TOKENS):
        config = told(tmp_path, *names, listen=listen)
        with pytest.raises(OpenToEverybody, match="is refused"):
            check_exposure(config)
        allowed = told(tmp_path, *names, listen=listen, allow_insecure=True)
        check_exposure(allowed)
        assert exposure(allowed)
    for enough in (MUTUAL, (*TLS_ONLY, *TOKENS)):
        config = told(tmp_path, *enough, listen=listen)
        check_exposure(config)
        assert not exposure(config)


@pytest.mark.parametrize("listen", HERE)
def test_a_service_on_loopback_may_be_open(tmp_path: Path, listen: str) -> None:
    config = told(tmp_path, listen=listen)
    check_exposure(config)
    assert not exposure(config)


def test_a_process_exits_before_it_listens_openly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def run(config: FilterConfig) -> None:
        raise AssertionError("it runs")

    monkeypatch.setenv("SEQGATE_FILTER_LISTEN", "0.0.0.0:0")
    assert run_service(FilterConfig, run) == 2
    said = capsys.readouterr().err
    assert said.startswith("filter: listen = '0.0.0.0:0' is refused: unauthenticated callers")
    assert "allow_insecure" in said

    monkeypatch.setenv("SEQGATE_FILTER_LISTEN", "127.0.0.1:0")
    for name, value in settings(tmp_path).items():
        monkeypatch.setenv(f"SEQGATE_FILTER_{name.upper()}", str(value))
    assert run_service(FilterConfig, run) == 2
    assert str(tmp_path / "a") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "here"),
    [
        *((target, True) for target in HERE),
        *((target, False) for target in EVERYWHERE),
        ("unix:/run/ledger", True),
        ("unix-abstract:ledger", True),
        ("unixhost:1", False),
        ("dns:///localhost:1", True),
        ("dns:///ledger:1", False),
        ("dns://10.0.0.1/localhost:1", False),
        ("dns:localhost:1", True),
        ("ipv4:127.0.0.1:1", True),
        ("ipv4:127.0.0.1:1,10.0.0.1:1", False),
        ("ipv4:10.0.0.1:1,127.0.0.1:1", False),
        ("ipv4:127.0.0.1:1,127.0.0.2:2", True),
        ("ipv6:[::1]:1,[::1]:2", True),
        ("ipv6:[::1]:1,[2001:db8::1]:2", False),
        ("127.0.0.1:1,127.0.0.2:2", False),
        ("ipv6:[::1]:1", True),
        ("localhost.example:1", False),
        ("dns:1", False),
    ],
)
def test_loopback_targets_are_recognized(target: str, here: bool) -> None:
    assert is_loopback(target) is here


# ---- names


@pytest.mark.parametrize(
    ("properties", "names"),
    [
        ({}, None),
        ({"peer_uri": [b"spiffe://a/b"], "peer_dns": [b"c"]}, ("uri:spiffe://a/b",)),
        ({"peer_uri": [], "peer_dns": [b"c", b"d"]}, ("dns:c", "dns:d")),
        ({"x509_common_name": [b"\xc3\xa9"]}, ("cn:\N{LATIN SMALL LETTER E WITH ACUTE}",)),
        ({"x509_common_name": [b""]}, None),
        ({"x509_common_name": [b"\xff"]}, None),
        ({"x509_common_name": [b"two\nlines"]}, None),
        ({"x509_common_name": [b"nul\x00"]}, None),
        ({"x509_common_name": [b"x" * (NAME_CHARS_MAX + 1)]}, None),
        ({"peer_dns": [b"bad\x00"], "x509_common_name": [b"good"]}, ("cn:good",)),
        ({"peer_email": [b"a@b"]}, None),
    ],
)
def test_a_certificate_has_these_principals(
    properties: Mapping[str, list[bytes]], names: tuple[str, ...] | None
) -> None:
    found = of_certificate(properties)
    assert (None if found is None else found.names) == names


@pytest.mark.parametrize("subject", [None, "", 7, ["x"], "two\nlines", "x" * 1_025])
def test_a_token_must_have_a_subject(subject: object) -> None:
    assert of_token({"sub": subject}) is None
    assert of_token({"sub": "alice"}) == Principal(("sub:alice",))


# ---- tokens


def told_nothing(_: str) -> None:
    return None


def tokens(file: Path) -> Tokens:
    return Tokens(file, audience=Issuer.AUDIENCE, issuer=Issuer.NAME, on_change=told_nothing)


def signed(key: Any, algorithm: str, key_id: str | None = None, **claims: Any) -> str:
    said = {"sub": "alice", "aud": Issuer.AUDIENCE, "iss": Issuer.NAME, "exp": 2**33, **claims}
    return jwt.encode(said, key, algorithm, headers={"kid": key_id} if key_id else None)


def pem(key: Any) -> bytes:
    return bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


RSA_KEY = rsa.generate_private_key(65537, 2048)


def test_each_key_has_one_algorithm(tmp_path: Path) -> None:
    keys = {
        "RS256": RSA_KEY,
        "ES256": ec.generate_private_key(ec.SECP256R1()),
        "EdDSA": ed25519.Ed25519PrivateKey.generate(),
    }
    file = tmp_path / "keys.pem"
    file.write_bytes(b"keys of us\n".join(pem(key) for key in keys.values()))
    held = tokens(file)
    for algorithm, key in keys.items():
        assert held.principal(signed(key, algorithm)) == Principal(("sub:alice",))
    for algorithm in ("RS384", "RS512", "PS256"):
        with pytest.raises(InvalidToken):
            held.principal(signed(RSA_KEY, algorithm))


def test_a_key_id_selects_a_key_and_no_key_id_tries_all(tmp_path: Path) -> None:
    first, second = Issuer(tmp_path / "a.json", "one"), Issuer(tmp_path / "b.json", "two")
    first.publish(second)
    held = tokens(first.file)
    assert held.principal(second.token("bob")) == Principal(("sub:bob",))
    assert held.principal(signed(second.key, "ES256")) == Principal(("sub:alice",))
    with pytest.raises(InvalidToken):
        held.principal(signed(second.key, "ES256", "one"))
    with pytest.raises(InvalidToken):
        held.principal(signed(second.key, "ES256", "three"))


def test_keys_for_other_purposes_are_ignored(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "keys.json")
    other = Issuer(tmp_path / "other.json", "enc")
    unknown = {"kty": "OKP", "crv": "X25519", "x": "AAAA", "kid": "x"}
    held = {"keys": [{**other.jwk, "use": "enc"}, unknown, issuer.jwk]}
    issuer.file.write_text(json.dumps(held))
    assert len(read_keys(issuer.file)) == 1
    with pytest.raises(InvalidToken):
        tokens(issuer.file).principal(other.token("alice"))


def private_pem(key: Any) -> bytes:
    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "neither a JSON Web Key Set nor"),
        (b"[]", "neither a JSON Web Key Set nor"),
        (b'{"keys": []}', "neither|1 to 100"),
        (b'{"keys": 7}', "neither"),
        (b"\xff", "neither"),
        (private_pem(ec.generate_private_key(ec.SECP256R1())), "private key"),
        (pem(rsa.generate_private_key(65537, 1024)), "2048 bits"),
        (pem(ec.generate_private_key(ec.SECP384R1())), "P-256"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "keys"),
        (pem(RSA_KEY) * 101, "1 to 100"),
    ],
)
def test_a_file_without_usable_keys_is_rejected(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_keys(file)


def test_a_cached_token_expires_on_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    issuer = Issuer(tmp_path / "keys.json")
    held = tokens(issuer.file)
    token = issuer.token("alice", ends=timedelta(seconds=-20))  # within the leeway for clocks
    assert held.principal(token) == held.principal(token)
    monkeypatch.setattr("seqgate.services.runtime.tokens.LEEWAY_S", 0)
    held._known.clear()
    with pytest.raises(DomainError) as refused:
        held.principal(token)
    assert refused.value.reason == "TOKEN_EXPIRED"


def test_an_expired_token_leaves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    issuer = Issuer(tmp_path / "keys.json")
    held = tokens(issuer.file)
    token = issuer.token("alice")
    held.principal(token)
    (digest,) = held._known
    held._known[digest] = held._known[digest][0], 1.0  # in 1970
    assert held.principal(token) == Principal(("sub:alice",))
    assert held._known[digest][1] > 1.0


def test_the_token_cache_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqgate.services.runtime.tokens.REMEMBERED_MAX", 3)
    issuer = Issuer(tmp_path / "keys.json")
    held = tokens(issuer.file)
    for number in range(10):
        held.principal(issuer.token(f"user{number}"))
        assert len(held._known) <= 3


# ---- files


def test_a_changed_file_is_reread_unless_invalid(tmp_path: Path) -> None:
    file, said = tmp_path / "f", list[str]()
    replace(file, b"1")
    watched = Watched([file], lambda: int(file.read_text()), said.append, interval_s=0)
    assert watched.get() == 1
    replace(file, b"2")
    assert watched.get() == 2
    replace(file, b"two")
    assert (watched.get(), watched.get(), watched.get()) == (2, 2, 2)
    file.unlink()
    assert (watched.get(), watched.get()) == (2, 2)
    replace(file, b"3")
    assert watched.get() == 3
    assert [bool(why) for why in said] == [False, True, True, False]


def test_replacing_a_symbolic_link_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes updates mounted files."""
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "f").write_text(version)
    (tmp_path / "data").symlink_to("1")
    file = tmp_path / "data" / "f"
    watched = Watched([file], lambda: int(file.read_text()), told_nothing, interval_s=0)
    (tmp_path / "new").symlink_to("2")
    (tmp_path / "new").replace(tmp_path / "data")
    assert watched.get() == 2


def test_a_file_is_not_checked_for_every_call(tmp_path: Path) -> None:
    file = tmp_path / "f"
    replace(file, b"1")
    watched = Watched([file], lambda: int(file.read_text()), told_nothing, interval_s=3600)
    replace(file, b"2")
    assert watched.get() == 1


def test_files_that_must_match_are_reread_once_they_match(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    renewed = authority.issue("renewed")
    files = authority.issue("caller")
    tls = TLS(authority.file, files.certificate, files.key)
    said: list[str] = []
    watched = Watched(tls.files, lambda: channel_credentials(tls), said.append, interval_s=0)
    before = watched.get()
    replace(files.certificate, renewed.certificate.read_bytes())
    assert watched.get() is before
    replace(files.key, renewed.key.read_bytes())
    assert watched.get() is not before
    assert any("not a certificate in PEM" in why for why in said)


def test_errors_name_the_unusable_file(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, two = authority.issue("one"), authority.issue("two")
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    for tls in (
        TLS(empty),
        TLS(authority.file, one.certificate, two.key),
        TLS(authority.file, empty, one.key),
        TLS(authority.file, one.certificate, empty),
    ):
        with pytest.raises(ValueError, match=str(tmp_path)):
            channel_credentials(tls)
    with pytest.raises(FileNotFoundError):
        channel_credentials(TLS(tmp_path / "none"))
    with pytest.raises(ValueError, match="together"):
        TLS(authority.file, one.certificate)


@pytest.mark.parametrize("token", ["", " ", "a b", "a\nb", "\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_malformed_tokens_are_rejected(tmp_path: Path, token: str) -> None:
    file = tmp_path / "token"
    file.write_text(token)
    for given in (token, file):
        with pytest.raises(ValueError, match=r"token|ascii"):
            TokenSource(given, told_nothing)


def test_jobs_take_their_settings_from_the_environment() -> None:
    assert of_environment({}) == (None, None)
    assert of_environment({"SEQGATE_CA_FILE": ""}) == (None, None)
    named = {
        "SEQGATE_CA_FILE": "ca",
        "SEQGATE_CERTIFICATE_FILE": "c",
        "SEQGATE_KEY_FILE": "k",
        "SEQGATE_TOKEN_FILE": "t",
    }
    assert of_environment(named) == (TLS(Path("ca"), Path("c"), Path("k")), Path("t"))
    with pytest.raises(ValueError, match="SEQGATE_CA_FILE"):
        of_environment({"SEQGATE_KEY_FILE": "k"})


# ---- denials


def test_denials_are_counted_and_sampled_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    denials = RefusalLog(lambda: now)
    refusal = PermissionDenied("no", principal="sub:alice", verb="read", topic="a/b/c")
    for _ in range(100):
        record_denial(denials, refusal, "/s/Read", "sub:alice", "ipv4:1.2.3.4:5")
    record_denial(denials, refusal, "/s/Read", "sub:bob", "ipv4:1.2.3.4:5")
    record_denial(denials, InvalidToken("no"), "/s/Read", "", "ipv4:1.2.3.4:5")
    assert len(capsys.readouterr().out.splitlines()) == 3
    now = 61.0
    record_denial(denials, refusal, "/s/Read", "sub:alice", "ipv4:1.2.3.4:5")
    (line,) = capsys.readouterr().out.splitlines()
    assert "suppressed=99" in line
    assert "a/b/c" in line
    assert denials.counts == {
        ("PERMISSION_DENIED", "/s/Read"): 102,
        ("INVALID_TOKEN", "/s/Read"): 1,
    }
