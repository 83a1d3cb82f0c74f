"""Settings of the console: SEQGATE_CONSOLE_<NAME>."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from seqgate.services.runtime.config import MetricsConfig, Port, Seconds, Target, settings_for
from seqgate.tls import TLS, is_loopback


def _origin(text: str) -> str:
    parts = urlsplit(text)
    is_whole = parts.scheme in ("http", "https") and parts.netloc != ""
    if text and not (is_whole and text == f"{parts.scheme}://{parts.netloc}"):
        raise ValueError("must be https://name or https://name:port, without a path")
    return text.lower()


class ConsoleConfig(MetricsConfig):
    """The settings of the console."""

    model_config = settings_for("console")
    service: ClassVar[str] = "console"

    listen: Port = "127.0.0.1:7707"

    ledger_target: Target = "127.0.0.1:7702"
    """The ledger service: host:port, or dns:///name:port to reach every address of the name."""

    dedup_target: Target = "127.0.0.1:7701"
    """The dedup service."""

    cursor_target: Target = "127.0.0.1:7703"
    """The cursor service."""

    dispatcher_target: Target = "127.0.0.1:7704"
    """The dispatcher service."""

    filter_target: Target = "127.0.0.1:7705"
    """The filter service."""

    credentials: Literal["token", "certificate", "none"] = "none"
    """Who the services see. token: the reader, who signs in with a token; without one, the console
    calls nothing. certificate: the console itself, by peer_certificate_file, for every reader; it
    is read-only then. none: for services that do not authenticate callers."""

    peer_ca_file: Path | None = None
    """The authorities, in PEM, of the services, which are then called over TLS. None: no TLS."""

    peer_certificate_file: Path | None = None
    """The client certificate chain, in PEM, presented to them; None: none. With `token`, it opens
    the connection, and the reader's token decides what may be done on it."""

    peer_key_file: Path | None = None
    """Its key, in PEM, without a passphrase."""

    origin: Annotated[str, AfterValidator(_origin)] = ""
    """Where readers reach the console: https://name or https://name:port. Requests to another host,
    and forms sent from another origin, are refused. Required unless `listen` is on this machine.
    Empty: any name of this machine."""

    refresh_s: Annotated[float, Field(ge=0.2, le=3600)] = 3
    """The interval at which open pages update themselves, in seconds."""

    call_timeout_s: Seconds = 5
    """The time limit of a call to a service, in seconds."""

    requests_max: Annotated[int, Field(ge=1, le=100_000)] = 200
    """The most connections and requests served at once; one beyond that is answered with 503."""

    @property
    def metrics_authorities(self) -> Path | None:
        return self.peer_ca_file

    @property
    def tls(self) -> TLS | None:
        """How services are called over TLS; None: without."""
        if self.peer_ca_file is None:
            return None
        return TLS(self.peer_ca_file, self.peer_certificate_file, self.peer_key_file)

    @property
    def is_secure(self) -> bool:
        """Whether browsers reach the console over TLS."""
        return self.origin.startswith("https:") or self.tls_certificate_file is not None

    @property
    def targets(self) -> dict[str, str]:
        """The services' addresses, by name."""
        names = ("ledger", "dedup", "cursor", "dispatcher", "filter")
        return {name: getattr(self, f"{name}_target") for name in names}

    def check(self) -> None:
        if (self.peer_certificate_file is None) != (self.peer_key_file is None):
            raise ValueError("peer_certificate_file and peer_key_file must be set together")
        if self.peer_certificate_file is not None and self.peer_ca_file is None:
            raise ValueError("peer_certificate_file requires peer_ca_file")
        if self.credentials == "certificate" and self.peer_certificate_file is None:
            raise ValueError("credentials = certificate requires peer_certificate_file")
        if self.credentials == "none" and self.peer_certificate_file is not None:
            raise ValueError("with peer_certificate_file, credentials is token or certificate")
        sends_tokens = self.credentials == "token" and self.peer_ca_file is None
        if sends_tokens and not all(map(is_loopback, self.targets.values())):
            raise ValueError(
                "credentials = token requires peer_ca_file: tokens are not sent in plain"
            )
        if is_loopback(self.listen):
            return
        if not self.origin:
            raise ValueError("origin is required unless listen is on 127.0.0.1")
        if not self.allow_insecure and not (
            self.tls_certificate_file is not None and self.credentials == "token"
        ):
            raise ValueError(
                f"listen = {self.listen!r} is refused: readers need a token, and TLS. Set "
                "tls_certificate_file and tls_key_file, and credentials = token; or "
                "allow_insecure, or listen on 127.0.0.1"
            )
