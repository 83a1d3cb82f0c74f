"""A stack with mutual TLS between its services, and client certificates or tokens for callers."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from grpc import aio

from seqgate.client._channel import Security, open_channel
from seqgate.dev import stack as stack_module
from seqgate.dev.ports import free_ports
from seqgate.dev.stack import SERVICES, Stack
from seqgate.tls import TLS, BearerToken
from tests.support.authority import Authority, Files, Issuer
from tests.support.publisher import STATUS_LOST
from tests.support.rpcs import VERBS, Rpc

ROLES: Final = ("ledger", "dedup", "dispatcher", "jobs")

USER: Final = "spiffe://example/user"


def identity(service: str) -> str:
    """The name in a service's certificate."""
    return f"spiffe://example/seqgate/{service}"


def rules() -> str:
    """The access rules: services have their roles, sub:<verb> has that verb in acme/shop, sub:all
    every verb, and USER every verb but keep."""
    lines = ["[services]", *(f'{role} = ["uri:{identity(role)}"]' for role in ROLES)]
    for verb in VERBS:
        lines += _rule(f"sub:{verb}", [verb])
    lines += _rule("sub:all", list(VERBS))
    lines += _rule(f"uri:{USER}", ["publish", "consume", "read", "administer"])
    return "\n".join(lines)


def _rule(principal: str, verbs: Sequence[str]) -> list[str]:
    return [
        "[[rules]]",
        f'principals = ["{principal}"]',
        f"verbs = {list(verbs)}",
        'topics = ["acme/shop/*"]',
    ]


class SecuredStack(Stack):
    """A stack with an authority, an issuer of tokens, and access rules."""

    def __init__(self, folder: Path, **given: Any) -> None:
        super().__init__(folder, **given)
        self.authority = Authority(folder / "tls")
        self.issuer = Issuer(folder / "tls" / "keys.json")
        self.access_file = folder / "access.toml"
        self.access_file.write_text(rules())
        self.shown = {
            name: self.authority.issue(
                name, uris=[identity(name)], hosts=["localhost", "127.0.0.1"]
            )
            for name in (*SERVICES, "jobs")
        }
        self.user = self.authority.issue("user", uris=[USER])
        count = len(self.services)
        ports = free_ports(2 * count)
        self._probed = dict(zip(self.services, ports[:count], strict=True))
        self.told = dict(zip(self.services, ports[count:], strict=True))
        """The metrics ports of the processes."""

    @property
    def settings(self) -> dict[str, str]:
        settings = dict(super().settings)
        for service in SERVICES:
            mine = self.shown[service]
            own: dict[str, object] = {
                "TLS_CERTIFICATE_FILE": mine.certificate,
                "TLS_KEY_FILE": mine.key,
                "TLS_CLIENT_CA_FILE": self.authority.file,
                "JWT_KEYS_FILE": self.issuer.file,
                "JWT_AUDIENCE": self.issuer.AUDIENCE,
                "JWT_ISSUER": self.issuer.NAME,
                "ACCESS_FILE": self.access_file,
            }
            if service not in ("cursor", "filter"):  # these call no service
                own |= {
                    "PEER_CA_FILE": self.authority.file,
                    "PEER_CERTIFICATE_FILE": mine.certificate,
                    "PEER_KEY_FILE": mine.key,
                }
            settings |= {f"SEQGATE_{service.upper()}_{key}": str(own[key]) for key in own}
        return settings

    def target(self, service: str) -> str:
        """The address of one instance: no certificate can name a list of addresses."""
        return self.address(service)

    def _own_settings(self, name: str) -> dict[str, str]:
        service = name.partition("-")[0]
        if name == "redis":
            return super()._own_settings(name)
        probed = f"127.0.0.1:{self._probed[name]}"
        return {
            **super()._own_settings(name),
            f"SEQGATE_{service.upper()}_HEALTH_LISTEN": probed,
            f"SEQGATE_{service.upper()}_METRICS_LISTEN": f"127.0.0.1:{self.told[name]}",
        }

    async def _answers(self, name: str) -> bool:
        if name == "redis":
            return await super()._answers(name)
        return await stack_module._serves(f"127.0.0.1:{self._probed[name]}")

    def security(self, shown: Files | None = None, token: BearerToken | None = None) -> Security:
        """A caller's credentials: a certificate, by default the user's, and a token."""
        files = shown or self.user
        return Security(TLS(self.authority.file, files.certificate, files.key), token)

    def channel(
        self, service: str, shown: Files | None = None, token: BearerToken | None = None
    ) -> aio.Channel:
        """A channel to a service."""
        return open_channel(self.address(service), self.security(shown, token))

    def variables(self, token_file: Path | None = None) -> Mapping[str, str]:
        """The variables of the command line."""
        told = {
            "SEQGATE_CA_FILE": str(self.authority.file),
            "SEQGATE_CERTIFICATE_FILE": str(self.user.certificate),
            "SEQGATE_KEY_FILE": str(self.user.key),
            **{f"SEQGATE_{service.upper()}": self.address(service) for service in SERVICES},
        }
        return told if token_file is None else {**told, "SEQGATE_TOKEN_FILE": str(token_file)}


async def first_answer(channel: aio.Channel, rpc: Rpc, request: Any, timeout_s: float) -> Any:
    """The first answer of a method.

    Raises:
        AioRpcError: the service refused the call.
    """
    method = rpc.descriptor
    kinds: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    multi: Any = kinds[method.client_streaming, method.server_streaming](
        rpc.path,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=lambda held: held,
    )
    if not method.client_streaming:
        call = multi(request, timeout=timeout_s)
        return await (call.read() if method.server_streaming else call)

    while True:
        call = multi(timeout=timeout_s)
        try:
            with suppress(asyncio.InvalidStateError):  # ended already: the next call has the error
                await call.write(request)
                if not method.server_streaming:
                    await call.done_writing()
            return await (call.read() if method.server_streaming else call)
        except aio.AioRpcError as error:
            if error.details() != STATUS_LOST:
                raise
        finally:
            call.cancel()
