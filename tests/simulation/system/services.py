"""Each service as a process, wired by its own app; only the stores are simulated."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from seqgate.services.cursor import app as cursor_app
from seqgate.services.cursor.config import CursorConfig
from seqgate.services.dedup import app as dedup_app
from seqgate.services.dedup.config import DedupConfig
from seqgate.services.dispatcher import app as dispatcher_app
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.filter import app as filter_app
from seqgate.services.filter.config import FilterConfig
from seqgate.services.ledger import app as ledger_app
from seqgate.services.ledger.adapters.dedup import GrpcDeduplicator
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.ledger.owners import SharedOwner
from seqgate.services.runtime.channels import peer_channel

PORTS: Final = {"dedup": 7701, "ledger": 7702, "cursor": 7703, "dispatcher": 7704, "filter": 7705}

HEALTH_INTERVAL_S: Final = 5.0
"""The interval of health checks between services. Rare, because nothing here depends on them."""

Run = Callable[[], Awaitable[None]]
Config = TypeVar("Config", bound=BaseModel)


def address(service: str, number: int) -> str:
    """The address of an instance; its host is its process's name."""
    return f"{service}-{number}:{PORTS[service]}"


def target(service: str, instances: int) -> str:
    """The target of a service's callers."""
    if instances == 1:
        return address(service, 0)
    return f"dns:///{service}:{PORTS[service]}"


def configured(kind: type[Config], **settings: Any) -> Config:
    """Validated settings. Reads no environment and no file, which would take longer than all the
    rest of a service's start."""
    config = kind.__new__(kind)
    BaseModel.__init__(config, **settings)
    return config


def run_of(
    service: str,
    number: int,
    *,
    limits: Mapping[str, Any],
    instances: Mapping[str, int],
    store: Any,
    register: Any = None,
) -> Run:
    """The main coroutine of an instance."""
    common: dict[str, Any] = {
        "listen": address(service, number),
        "health_interval_s": HEALTH_INTERVAL_S,
        "allow_insecure": True,
        "log_level": "warning",
    }

    def at(name: str) -> str:
        return target(name, instances[name])

    match service:
        case "cursor":
            cursor_config = configured(CursorConfig, **common, **limits)
            return lambda: cursor_app.serve(cursor_config, store)
        case "dedup":
            dedup_config = configured(DedupConfig, **common, **limits, cursor_target=at("cursor"))
            return lambda: _run_dedup(dedup_config, store)
        case "ledger":
            ledger_config = configured(
                LedgerConfig,
                **common,
                **limits,
                dedup_target=at("dedup"),
                cursor_target=at("cursor"),
            )
            return lambda: _run_ledger(ledger_config, store, register)
        case "dispatcher":
            dispatcher_config = configured(
                DispatcherConfig,
                **common,
                **limits,
                ledger_target=at("ledger"),
                cursor_target=at("cursor"),
                filter_target=at("filter"),
            )
            return lambda: dispatcher_app.run(dispatcher_config)
        case "filter":
            filter_config = configured(FilterConfig, **common, **limits)
            return lambda: filter_app.run(filter_config)
        case _:
            raise ValueError(service)


async def _run_ledger(config: LedgerConfig, store: Any, register: Any) -> None:
    owner = None if register is None else SharedOwner(register, config.listen)
    async with (
        peer_channel(
            config.dedup_target, keepalive_s=config.keepalive_s, as_caller=config
        ) as channel,
        ledger_app.connect_cursors(config) as cursors,
    ):
        dedup = GrpcDeduplicator(channel, timeout_s=config.dedup_timeout_s)
        try:
            await ledger_app.serve(config, store, dedup, cursors, owner=owner)
        finally:
            dedup.close()


async def _run_dedup(config: DedupConfig, store: Any) -> None:
    async with dedup_app.connect_cursors(config) as cursors:
        await dedup_app.serve(config, store, cursors)
