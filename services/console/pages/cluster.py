"""The cluster: the services' instances and their health, and who owns subscriptions."""

import asyncio
import socket
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Final

from grpc import aio

from seqgate.channels import open_channel
from seqgate.client._frames import Sampler, frame_of
from seqgate.services.console.pages.query import pattern_of
from seqgate.services.console.pages.visit import Values, Visit
from seqgate.services.runtime.channels import list_health
from seqgate.services.runtime.health import LIVENESS
from seqgate.tls import TLS

CHECKED_S: Final = 2.0
"""The age at which an instance's health is asked for again, in seconds."""

INSTANCES_MAX: Final = 50
"""The most instances of a service that are asked for their health."""


async def cluster(visit: Visit) -> Values:
    instances = await checked_instances(visit)
    prefix = visit.query.get("prefix", "")
    sample = await Sampler(visit.calls, pattern_of(prefix)).sample()
    if not prefix and visit.prefix and "ledger" in sample.away:
        prefix = visit.prefix  # rights may cover that and no more
        sample = await Sampler(visit.calls, pattern_of(prefix)).sample()
    owners: dict[str, int] = {}
    for topic in sample.topics.values():
        for each in topic.subscriptions or ():
            owners[each.owner] = owners.get(each.owner, 0) + 1
    return {
        "instances": instances,
        "owners": sorted(owners.items()),
        "prefix": prefix,
        "away": frame_of(sample, None, "name")["away"],
        "version": version("seqgate"),
    }


async def checked_instances(visit: Visit) -> Sequence[Values]:
    """Every instance of every service. Health takes no rights, so all readers share an answer of
    less than CHECKED_S."""
    at_s, found = visit.memory.instances
    if time.monotonic() - at_s > CHECKED_S:
        rows = await asyncio.gather(*(_instances(visit, name) for name in visit.config.targets))
        found = [each for row in rows for each in row]
        visit.memory.instances = time.monotonic(), found
    return found


async def _instances(visit: Visit, service: str) -> list[Values]:
    target = visit.config.targets[service]
    addresses = await addresses_of(target)

    async def of(address: str) -> Values:
        state = await _health(visit, address, target)
        return {"service": service, "target": target, "address": address, **state}

    return list(await asyncio.gather(*(of(each) for each in addresses[:INSTANCES_MAX])))


async def _health(visit: Visit, address: str, target: str) -> Values:
    """An instance's state, its version, and each of its dependencies and whether it answers."""
    tls = visit.config.tls
    if tls is not None:  # the certificate is for the name, not for the address
        host = target.rpartition("/")[2].rpartition(":")[0]
        tls = TLS(tls.ca_file, tls.certificate_file, tls.key_file, server_name=host)
    started_s = time.monotonic()
    async with open_channel(address, options=[], hooks=[], tls=tls) as channel:
        try:
            version_, serving = await list_health(channel, visit.config.call_timeout_s)
        except aio.AioRpcError as error:
            return {"state": "UNREACHABLE", "why": error.code().name}
    names = sorted(each for each in serving if each not in ("", LIVENESS) and "." not in each)
    return {
        "state": "READY" if serving[""] else "NOT READY",
        "why": "",
        "took_ms": (time.monotonic() - started_s) * 1000,
        "version": version_,
        "needs": [(name, serving[name]) for name in names],
    }


async def addresses_of(target: str) -> list[str]:
    """The addresses behind a target."""
    if target.startswith(("ipv4:", "ipv6:")):
        return target.partition(":")[2].split(",")
    if target.startswith("unix"):
        return [target]
    host, _, port = target.rpartition("/")[2].rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return [f"{host}:{port}"]
    hosts = sorted({str(each[4][0]) for each in found})
    return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts]
