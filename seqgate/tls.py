"""How callers show who they are: TLS, certificates and tokens.

gRPC for Python takes a client's certificate when a channel is made, and never again. So a channel
here stands for one that is made anew when the files change: calls that begin afterwards use the new
certificate, on a connection of its own; calls that are under way end where they began. TLS is 1.2
or 1.3, as gRPC has it.
"""

import asyncio
import ipaddress
import logging
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from grpc import aio

from seqgate.errors import AuthenticationError
from seqgate.watched import OnChange, Watched

BearerToken = str | Path | Callable[[], str]
"""A bearer token: itself; a file that holds it, and is read again when it changes; or a function
that is called for each call, and must not block."""

TOKEN_BYTES_MAX: Final = 16 * 1024
"""The longest token, in bytes: what a service takes as metadata unless told otherwise."""

AUTHORIZATION: Final = "authorization"

_log: Final = logging.getLogger("seqgate.client")

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class TLS:
    """How to connect over TLS.

    Attributes:
        ca_file: the authorities, in PEM, whose certificates are believed; None: those that come
            with gRPC.
        certificate_file: the caller's own certificate chain, in PEM, where services ask for one.
        key_file: its key, in PEM, without a passphrase. Both or none.
        server_name: the name that a service's certificate must have; None: the one that is
            connected to.
    """

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("a certificate and its key are given together")

    @property
    def files(self) -> tuple[Path, ...]:
        """Those that are read."""
        each = (self.ca_file, self.certificate_file, self.key_file)
        return tuple(Path(file) for file in each if file is not None)


def of_environment(environment: Mapping[str, str]) -> tuple[TLS | None, Path | None]:
    """What jobs go by: how to connect (None: without TLS), and the file with the token. The
    variables are SEQGATE_CA_FILE, SEQGATE_CERTIFICATE_FILE, SEQGATE_KEY_FILE, SEQGATE_TOKEN_FILE.

    Raises:
        ValueError: a certificate is named without its key, or either without authorities.
    """

    def file(name: str) -> Path | None:
        named = environment.get(f"SEQGATE_{name}_FILE")
        return Path(named) if named else None

    authorities, certificate, key = file("CA"), file("CERTIFICATE"), file("KEY")
    if authorities is None and (certificate or key):
        raise ValueError("SEQGATE_CERTIFICATE_FILE and SEQGATE_KEY_FILE need SEQGATE_CA_FILE")
    tls = None if authorities is None else TLS(authorities, certificate, key)
    return tls, file("TOKEN")


def channel_credentials(tls: TLS) -> grpc.ChannelCredentials:
    """What gRPC needs.

    Raises:
        OSError, ValueError: a file cannot be used, or the key is of another certificate.
    """
    authorities = None if tls.ca_file is None else certificates(Path(tls.ca_file))
    if tls.certificate_file is None or tls.key_file is None:
        return grpc.ssl_channel_credentials(authorities)
    chain, key = key_pair(Path(tls.certificate_file), Path(tls.key_file))
    return grpc.ssl_channel_credentials(authorities, key, chain)


def certificates(file: Path) -> bytes:
    """The authorities' certificates in a PEM file.

    Raises:
        OSError, ValueError: it cannot be read, or holds none.
    """
    held = file.read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=file)
    except ssl.SSLError as error:
        raise ValueError(f"{file}: no certificates in PEM") from error
    return held


def key_pair(certificate_file: Path, key_file: Path) -> tuple[bytes, bytes]:
    """A certificate chain and its key, in PEM.

    Raises:
        OSError, ValueError: a file cannot be read, or they do not belong together.
    """
    chain, key = certificate_file.read_bytes(), key_file.read_bytes()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate_file, key_file, password=_no_passphrase)
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(
            f"{certificate_file} and {key_file} are no certificate and its key in PEM, "
            "without a passphrase"
        ) from error
    return chain, key


def _no_passphrase() -> str:
    """Or OpenSSL would ask for one on the terminal."""
    raise ValueError("a key must not need a passphrase")


class TokenSource:
    """The token of each call."""

    def __init__(self, token: BearerToken, on_change: OnChange) -> None:
        """
        Raises:
            OSError, ValueError: the file cannot be read, or holds none.
        """
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
        """What goes with a call.

        Raises:
            AuthenticationError: there is no token to send.
        """
        try:
            return AUTHORIZATION, f"Bearer {self._get()}"
        except Exception as error:  # whatever an application's function raises
            raise AuthenticationError("there is no token to send") from error


def _checked(text: str) -> str:
    token = text.strip()
    if len(token) > TOKEN_BYTES_MAX or not _TOKEN.fullmatch(token):
        raise ValueError(f"a token is 1 to {TOKEN_BYTES_MAX:,} characters of base64 and dots")
    return token


def is_loopback(target: str) -> bool:
    """Whether what is sent to a target (host:port, or a URI of gRPC's) stays on this machine."""
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


def secure_channel(
    target: str,
    *,
    tls: TLS | None,
    token: BearerToken | None,
    options: Sequence[tuple[str, Any]],
    interceptors: Sequence[aio.ClientInterceptor] | None = None,
    on_change: OnChange,
) -> aio.Channel:
    """A channel over TLS, or with a token, or both; see the module.

    Args:
        on_change: see Watched.

    Raises:
        OSError, ValueError: a file cannot be used, or a token would leave this machine in the
            clear.
    """
    if token is not None and tls is None and not is_loopback(target):
        raise ValueError(
            f"a token is not sent to {target} without TLS: it could be read on the way"
        )
    source = None if token is None else TokenSource(token, on_change)

    def make(credentials: grpc.ChannelCredentials | None) -> aio.Channel:
        if credentials is None:
            return aio.insecure_channel(target, options=options, interceptors=interceptors)
        named = [*options]
        if tls is not None and tls.server_name is not None:
            named.append(("grpc.ssl_target_name_override", tls.server_name))
        return aio.secure_channel(target, credentials, options=named, interceptors=interceptors)

    if tls is None:
        return RenewedChannel(make, lambda: None, source)
    given = tls
    credentials = Watched(given.files, lambda: channel_credentials(given), on_change)
    return RenewedChannel(make, credentials.get, source)


def blocking_channel(
    target: str,
    *,
    tls: TLS | None,
    token_file: Path | None,
    options: Sequence[tuple[str, Any]],
) -> grpc.Channel:
    """A channel for threads. Its certificate is the one of now; its token is read for each call.

    Raises:
        OSError, ValueError: a file cannot be used, or a token is to be sent without TLS.
    """
    if tls is None:
        if token_file is not None:
            raise ValueError(f"a token is not sent to {target} without TLS")
        return grpc.insecure_channel(target, options=options)
    credentials = channel_credentials(tls)
    if token_file is not None:
        shown = grpc.metadata_call_credentials(_Show(TokenSource(token_file, _told)))
        credentials = grpc.composite_channel_credentials(credentials, shown)
    return grpc.secure_channel(target, credentials, options=options)


def _told(why: str) -> None:
    if why:
        _log.warning("a new token cannot be used, the one from before counts on: %s", why)


class _Show(grpc.AuthMetadataPlugin):
    """Adds the token to each call."""

    def __init__(self, source: TokenSource) -> None:
        self._source = source

    def __call__(
        self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback
    ) -> None:
        del context
        try:
            metadata = (self._source.metadata(),)
        except AuthenticationError as error:
            callback((), error)
        else:
            callback(metadata, None)


class _Generation:
    """A channel with one certificate, and how many calls are on it."""

    def __init__(self, channel: aio.Channel) -> None:
        self.channel = channel
        self.calls = 0
        self.is_old = False


class RenewedChannel(aio.Channel):
    """See the module."""

    def __init__(
        self,
        make: Callable[[grpc.ChannelCredentials | None], aio.Channel],
        credentials: Callable[[], grpc.ChannelCredentials | None],
        token: TokenSource | None,
    ) -> None:
        self._make = make
        self._credentials = credentials
        self._token = token
        self._made_of = credentials()
        self._generation = _Generation(make(self._made_of))
        self._closing: set[asyncio.Task[None]] = set()
        self._old: set[_Generation] = set()

    @property
    def generation(self) -> _Generation:
        """The channel for what begins now."""
        credentials = self._credentials()
        if credentials is not self._made_of:
            old, self._made_of = self._generation, credentials
            self._generation = _Generation(self._make(credentials))
            old.is_old = True
            self._old.add(old)
            self._let_go(old)
        return self._generation

    def call(self, generation: _Generation, call: Any) -> Any:
        """Count a call while it lasts."""
        generation.calls += 1

        def ended(_: Any) -> None:
            generation.calls -= 1
            self._let_go(generation)

        call.add_done_callback(ended)
        return call

    def with_token(self, metadata: Any) -> Any:
        """A call's metadata, and the token."""
        if self._token is None:
            return metadata
        return (*(metadata or ()), self._token.metadata())

    def _let_go(self, generation: _Generation) -> None:
        if generation in self._old and generation.calls == 0:
            self._old.discard(generation)
            task = asyncio.ensure_future(generation.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "unary_unary", method, args, kwargs)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "unary_stream", method, args, kwargs)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "stream_unary", method, args, kwargs)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "stream_stream", method, args, kwargs)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002 - gRPC's
        return self._generation.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._generation.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._generation.channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        closing, self._old = list(self._old), set()
        await self._generation.channel.close(grace)
        for generation in closing:
            await generation.channel.close(grace)
        if self._closing:
            await asyncio.wait(set(self._closing))

    async def __aenter__(self) -> "RenewedChannel":
        return self

    async def __aexit__(self, *rest: object) -> None:
        await self.close()


class _Method:
    """A method of a stub: each call goes to the channel of its time, with the token of its time."""

    def __init__(
        self, channel: RenewedChannel, kind: str, method: str, args: Any, kwargs: Any
    ) -> None:
        self._channel = channel
        self._kind = kind
        self._method = method
        self._args, self._kwargs = args, kwargs
        self._made_for: _Generation | None = None
        self._callable: Any = None

    def __call__(self, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        generation = self._channel.generation
        if generation is not self._made_for:
            make = getattr(generation.channel, self._kind)
            self._callable = make(self._method, *self._args, **self._kwargs)
            self._made_for = generation
        call = self._callable(*args, metadata=self._channel.with_token(metadata), **kwargs)
        return self._channel.call(generation, call)
