"""TLS certificates and bearer tokens of callers. TLS is 1.2 or 1.3: gRPC has no setting for it."""

import ipaddress
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from seqgate.errors import AuthenticationError
from seqgate.watched import OnChange, Watched

BearerToken = str | Path | Callable[[], str]
"""A bearer token: the token itself, a file that is reread when it changes, or a function that is
called for each call and must not block."""

TOKEN_BYTES_MAX: Final = 16 * 1024
"""The longest token: services accept that much metadata by default."""

AUTHORIZATION: Final = "authorization"

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class TLS:
    """How to connect over TLS.

    Attributes:
        ca_file: the trusted authorities, in PEM; None: gRPC's built-in ones.
        certificate_file: the caller's certificate chain, in PEM, for services that ask for one.
        key_file: its private key, in PEM, without a passphrase. Set both files or neither.
        server_name: the name that a service's certificate must have; None: the target's.
    """

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file must be set together")

    @property
    def files(self) -> tuple[Path, ...]:
        each = (self.ca_file, self.certificate_file, self.key_file)
        return tuple(Path(file) for file in each if file is not None)


def of_environment(environment: Mapping[str, str]) -> tuple[TLS | None, Path | None]:
    """The credentials of jobs: TLS (None: plain text) and the token's file, from SEQGATE_CA_FILE,
    SEQGATE_CERTIFICATE_FILE, SEQGATE_KEY_FILE and SEQGATE_TOKEN_FILE. Raises ValueError if
    certificate and key are not set together, or without SEQGATE_CA_FILE."""

    def file(name: str) -> Path | None:
        named = environment.get(f"SEQGATE_{name}_FILE")
        return Path(named) if named else None

    authorities, certificate, key = file("CA"), file("CERTIFICATE"), file("KEY")
    if authorities is None and (certificate or key):
        raise ValueError("SEQGATE_CERTIFICATE_FILE and SEQGATE_KEY_FILE require SEQGATE_CA_FILE")
    tls = None if authorities is None else TLS(authorities, certificate, key)
    return tls, file("TOKEN")


def channel_credentials(tls: TLS) -> grpc.ChannelCredentials:
    """A channel's credentials. Raises OSError or ValueError if a file is unreadable or invalid, or
    the key does not match."""
    authorities = None if tls.ca_file is None else certificates(Path(tls.ca_file))
    if tls.certificate_file is None or tls.key_file is None:
        return grpc.ssl_channel_credentials(authorities)
    chain, key = key_pair(Path(tls.certificate_file), Path(tls.key_file))
    return grpc.ssl_channel_credentials(authorities, key, chain)


def certificates(file: Path) -> bytes:
    """A PEM file's certificates. Raises OSError or ValueError if it is unreadable or has none."""
    content = file.read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=file)
    except ssl.SSLError as error:
        raise ValueError(f"{file}: no certificates in PEM") from error
    return content


def key_pair(certificate_file: Path, key_file: Path) -> tuple[bytes, bytes]:
    """A certificate chain and its key, in PEM. Raises OSError or ValueError if a file is unreadable
    or the key does not match."""
    chain, key = certificate_file.read_bytes(), key_file.read_bytes()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate_file, key_file, password=_no_passphrase)
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(
            f"{certificate_file} and {key_file} are not a certificate in PEM and its private key "
            "without a passphrase"
        ) from error
    return chain, key


def _no_passphrase() -> str:
    """Keeps OpenSSL from prompting on the terminal."""
    raise ValueError("the private key has a passphrase")


class TokenSource:
    def __init__(self, token: BearerToken, on_change: OnChange) -> None:
        """Raises OSError or ValueError if the token or its file is unreadable or invalid."""
        self._get: Callable[[], str]
        if isinstance(token, Path):
            file = token
            self._get = Watched(
                [file], lambda: _checked(file.read_text(encoding="ascii")), on_change
            ).get
        elif isinstance(token, str):
            given = _checked(token)
            self._get = lambda: given
        else:
            make = token
            self._get = lambda: _checked(make())

    def metadata(self) -> tuple[str, str]:
        """The `authorization` metadata of a call. Raises AuthenticationError if the application's
        function fails, or returns no valid token."""
        try:
            return AUTHORIZATION, f"Bearer {self._get()}"
        except Exception as error:  # from the application's function
            raise AuthenticationError("no valid bearer token for this call") from error


def _checked(text: str) -> str:
    token = text.strip()
    if len(token) > TOKEN_BYTES_MAX or not _TOKEN.fullmatch(token):
        raise ValueError(
            f"a token must have 1 to {TOKEN_BYTES_MAX:,} characters, of A-Z a-z 0-9 . _ ~ + / = -"
        )
    return token


def is_loopback(target: str) -> bool:
    """Whether a target (host:port, or a gRPC URI) is on this machine."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    for scheme in ("ipv4:", "ipv6:"):
        if target.startswith(scheme):  # a list of addresses
            return all(map(_is_loopback, target.removeprefix(scheme).split(",")))
    for scheme in ("dns:///", "dns:"):
        if target.startswith(scheme):
            target = target.removeprefix(scheme)
            break
    return _is_loopback(target)


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
