"""The security of a service: its certificate, its guard, and the configurations that it refuses."""

import ssl
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import grpc
import structlog

from seqgate.services.runtime.access import Access, Need, Verb
from seqgate.services.runtime.config import MetricsConfig, ServiceConfig
from seqgate.services.runtime.guard import Guard
from seqgate.services.runtime.rights import Right, Rights, always
from seqgate.services.runtime.tokens import Tokens
from seqgate.tls import certificates, is_loopback, key_pair
from seqgate.watched import OnChange, Watched

log = structlog.get_logger()

ACCESS_BYTES_MAX: Final = 4 * 1024 * 1024
"""The largest access file, in bytes."""

REFLECTION: Final = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class OpenToEverybody(ValueError):
    """A service would listen beyond this machine insecurely, without `allow_insecure`."""


def exposure(config: ServiceConfig) -> Sequence[str]:
    """The dangers of a service's listen address; none if it is reachable from this machine only."""
    if is_loopback(config.listen):
        return []
    found = []
    if not config.authenticates:
        found.append("unauthenticated callers have full access")
    if config.tls_certificate_file is None:
        found.append("requests and tokens are sent unencrypted")
    return found


def check_exposure(config: ServiceConfig) -> None:
    """
    Raises:
        OpenToEverybody: the service is reachable insecurely from other machines, and
            `allow_insecure` is not set.
    """
    found = exposure(config)
    if found and not config.allow_insecure:
        raise OpenToEverybody(
            f"listen = {config.listen!r} is refused: {'; '.join(found)}. Set tls_certificate_file "
            "and tls_key_file, tls_client_ca_file or jwt_keys_file, and access_file; or "
            "allow_insecure, or listen on 127.0.0.1"
        )


def check_files(config: ServiceConfig) -> None:
    """
    Raises:
        OSError, ValueError: a file cannot be used.
    """
    server_credentials(config)
    guard_of(config, {})


def server_credentials(config: ServiceConfig) -> grpc.ServerCredentials | None:
    """The service's certificate and its clients' authorities, from the files' current content on
    each connection; None: no TLS.

    Raises:
        OSError, ValueError: a file cannot be used.
    """
    certificate, key, authorities = (
        config.tls_certificate_file,
        config.tls_key_file,
        config.tls_client_ca_file,
    )
    if certificate is None or key is None:
        return None
    files = [file for file in (certificate, key, authorities) if file is not None]

    def read() -> grpc.ServerCertificateConfiguration:
        chain, secret = key_pair(certificate, key)
        roots = None if authorities is None else certificates(authorities)
        return grpc.ssl_server_certificate_configuration([(secret, chain)], root_certificates=roots)

    held = Watched(files, read, _logged("the certificate", certificate))
    return grpc.dynamic_ssl_server_credentials(
        held.get(), held.get, require_client_authentication=authorities is not None
    )


def metrics_context(config: MetricsConfig) -> Callable[[], ssl.SSLContext] | None:
    """The same for a server of metrics, on each connection; None: no TLS.

    Raises:
        OSError, ValueError: a file cannot be used.
    """
    certificate, key, authorities = (
        config.tls_certificate_file,
        config.tls_key_file,
        config.metrics_authorities,
    )
    if not (config.metrics_tls and certificate and key):
        return None
    files = [file for file in (certificate, key, authorities) if file is not None]

    def read() -> ssl.SSLContext:
        key_pair(certificate, key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        if authorities is not None:
            certificates(authorities)
            context.load_verify_locations(authorities)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    return Watched(files, read, _logged("the certificate", certificate)).get


def guard_of(config: ServiceConfig, rights: Rights) -> Guard | None:
    """The guard that authorizes calls; None: callers are not authenticated.

    Raises:
        OSError, ValueError: a file cannot be used.
    """
    if config.access_file is None:
        return None
    file = config.access_file
    tokens = None
    if config.jwt_keys_file is not None:
        tokens = Tokens(
            config.jwt_keys_file,
            audience=config.jwt_audience,
            issuer=config.jwt_issuer,
            on_change=_logged("keys of tokens", config.jwt_keys_file),
        )
    access = Watched([file], lambda: read_access(file), _logged("the access file", file))
    return Guard(
        access,
        tokens,
        {**rights, REFLECTION: _TO_REFLECT},
        certificates=config.tls_client_ca_file is not None,
    )


_TO_REFLECT: Final = Right(always(Need(frozenset({Verb.ADMINISTER}), None, None)))
"""Reflection requires the right to administer anything."""


def read_access(file: Path) -> Access:
    """The rules in a file.

    Raises:
        OSError, ValueError: the file cannot be read, or is invalid.
    """
    held = file.read_bytes()
    if len(held) > ACCESS_BYTES_MAX:
        raise ValueError(f"{file}: too large (limit {ACCESS_BYTES_MAX:,} bytes)")
    try:
        return Access.parse(tomllib.loads(held.decode()))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _logged(what: str, file: Path) -> OnChange:
    def on_change(error: str) -> None:
        if error:
            log.warning("file rejected, keeping the previous content", what=what, error=error)
        else:
            log.info("file loaded", what=what, file=str(file))

    return on_change
