"""Pods on this machine: the command of a workload's container, with its environment and files, on
loopback. Cluster addresses become local ports."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from seqgate.dev.child import Child, tell
from seqgate.dev.ports import free_ports
from seqgate.dev.stack import Stack
from tests.deploy.manifests import (
    K8S,
    Document,
    Manifests,
    Variable,
    Workload,
    is_of_postgres,
    read,
    render,
)
from tests.support.redis_server import running_redis
from tests.support.waiting import eventually

SERVING = health_pb2.HealthCheckResponse.SERVING

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")

READY_S = 60.0
STOP_S = 60.0

EVERYWHERE = "0.0.0.0"

_ADDRESS = re.compile(r"(?:dns:///)?((?:[a-z0-9-]+\.)*[a-z0-9-]+):([0-9]{4,5})\b")


class Node:
    """Runs pods as processes: one per component, or every instance of a component that keeps data.
    The first has the component's name, the others are ledger-1, ledger-2 ..."""

    def __init__(self, manifests: Manifests, folder: Path, ports: Mapping[str, int]) -> None:
        """
        Args:
            manifests: the installed manifests.
            folder: the parent of all volumes.
            ports: see `besides`.
        """
        self.manifests = manifests
        self.folder = folder
        self.pods: dict[str, Pod] = {}
        self.secrets: dict[str, dict[str, bytes]] = {}
        """The contents of Secrets, by name."""
        self.besides = dict(ports)
        """Ports of other local servers, by name; `postgres` is where the cluster's operator would
        run a server."""
        self._ports: dict[tuple[str, int], int] = {}

    def port(self, name: str, port: int) -> int:
        """The local port for a port of a pod's container."""
        if name in self.besides:
            return self.besides[name]
        if (name, port) not in self._ports:
            (self._ports[name, port],) = free_ports(1)
        return self._ports[name, port]

    async def start(self, *components: str) -> None:
        """Run these components' pods."""
        for component in components:
            workload = self.manifests.workload(component)
            for ordinal in range(workload.instances):
                await self._start(workload, ordinal)

    async def _start(self, workload: Workload, ordinal: int) -> None:
        name = _named(workload.component, ordinal)
        for path, volume in workload.mounts():
            self._fill(self.volume(name, path), volume)

        def variables(container: Document) -> dict[str, Variable]:
            given = workload.variables(f"{workload.name}-{ordinal}", container)
            return {
                key: Variable(self._addressed(name, each.value), each.source)
                for key, each in given.items()
            }

        log = self.folder / name / "log"
        with log.open("ab") as output:
            for each in workload.initial:
                await self._complete(name, workload, each, variables(each), output.fileno())
            process = await self.run(name, workload, variables(workload.container), output.fileno())
        self.pods[name] = Pod(self, name, workload, process, log)

    async def ready(self) -> None:
        """Return once all probes of all pods succeed."""
        for pod in self.pods.values():
            for probe in PROBES:
                await pod.becomes(probe)

    async def run(
        self, name: str, workload: Workload, variables: Mapping[str, Variable], log: int
    ) -> Child:
        """Run a pod's container."""
        command = [sys.executable, *workload.arguments(variables)]
        return await Stack.start_process(command, log, self._environment(workload, name, variables))

    async def _complete(
        self,
        name: str,
        workload: Workload,
        container: Document,
        variables: Mapping[str, Variable],
        log: int,
    ) -> None:
        """Run an initial container to its end."""
        environment = self._environment(workload, name, variables)
        process = await Stack.start_process([sys.executable, *container["args"]], log, environment)
        async with asyncio.timeout(READY_S):
            assert await process.wait() == 0, (self.folder / name / "log").read_text()

    def _environment(
        self, workload: Workload, name: str, variables: Mapping[str, Variable]
    ) -> dict[str, str]:
        filed = {key: self._filed(workload, name, each.value) for key, each in variables.items()}
        return {"PATH": os.environ["PATH"], **filed}

    async def end(self, pod: "Pod") -> None:
        tell(pod.process, SIGKILL)
        await pod.process.wait()

    def volume(self, name: str, path: str) -> Path:
        """The folder for a volume of a pod, by its mount path."""
        return self.folder / name / path.strip("/").replace("/", "-")

    def _addressed(self, name: str, text: str) -> str:
        """A value with its addresses replaced by local ones."""

        def address(found: re.Match[str]) -> str:
            host, port = found[1], int(found[2])
            reached = name if host == EVERYWHERE else self._reached(host)
            return f"127.0.0.1:{self.port(reached, port)}" if reached else found[0]

        return _ADDRESS.sub(address, text)

    def _reached(self, host: str) -> str | None:
        """The pod that a host name reaches: <pod>.<service> or <service>, with or without a
        suffix."""
        services = {each["metadata"]["name"]: each for each in self.manifests.of_kind("Service")}
        labels = host.split(".")
        for place, label in enumerate(labels[:2]):
            if label in services:
                component = services[label]["spec"]["selector"]["app.kubernetes.io/component"]
                ordinal = labels[0].rpartition("-")[2] if place else "0"
                return _named(component, int(ordinal))
        return "postgres" if is_of_postgres(host, self.manifests) else None

    def _filed(self, workload: Workload, name: str, text: str) -> str:
        """A value with its paths replaced by local ones."""
        paths = "|".join(re.escape(path) for path, _ in workload.mounts())
        return re.sub(rf"(?<![\w/])({paths})(?=/)", lambda f: str(self.volume(name, f[1])), text)

    def _fill(self, folder: Path, volume: Document) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if "projected" in volume:
            for source in volume["projected"]["sources"]:
                ((kind, chosen),) = source.items()
                held = self._held({kind: {"secretName": chosen["name"], **chosen}})
                for each in chosen["items"]:
                    _write(folder / each["path"], held[each["key"]])
            return
        for name, content in self._held(volume).items():
            _write(folder / name, content)

    def _held(self, volume: Document) -> Mapping[str, Any]:
        """The contents of a ConfigMap's or a Secret's volume."""
        if "configMap" in volume:
            data: Mapping[str, Any] = self.manifests.get("ConfigMap", volume["configMap"]["name"])[
                "data"
            ]
            return data
        return self.secrets[volume["secret"]["secretName"]] if "secret" in volume else {}


def _write(file: Path, content: str | bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


def _named(component: str, ordinal: int) -> str:
    return f"{component}-{ordinal}" if ordinal else component


class Pod:
    def __init__(
        self, node: Node, name: str, workload: Workload, process: Child, log: Path
    ) -> None:
        self.name = name
        self.workload = workload
        self.process = process
        self._node = node
        self._log = log

    async def probe(self, kind: str) -> bool:
        """Whether a probe succeeds, as the kubelet determines."""
        probe = self.workload.probes[kind]
        asked = probe["grpc"]
        assert asked["port"] in self.workload.ports.values()
        port = self._node.port(self.name, asked["port"])
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=asked.get("service", ""))
            try:
                reply = await stub.Check(request, timeout=probe["timeoutSeconds"])
            except aio.AioRpcError:
                return False
        return bool(reply.status == SERVING)

    async def becomes(self, kind: str, *, answering: bool = True) -> None:
        """Return once a probe has this outcome."""

        async def seen() -> bool:
            assert self.process.returncode is None, self._log.read_text()
            return await self.probe(kind) is answering

        await eventually(seen, f"{self.name} {kind} {answering}", within_s=READY_S)

    async def terminate(self) -> int:
        """Send SIGTERM. Returns the exit status."""
        tell(self.process, SIGTERM)
        async with asyncio.timeout(STOP_S):
            return await self.process.wait()


@asynccontextmanager
async def installed(overlay: str, folder: Path, node: type[Node] = Node) -> AsyncIterator[Node]:
    """An overlay on a node of its own, where only Redis is running."""
    manifests = Manifests(read(render(K8S / "overlays" / overlay)))
    (folder / "redis").mkdir()
    with running_redis(folder / "redis") as redis:
        made = node(manifests, folder, {"valkey": redis.port})
        try:
            yield made
        finally:
            for pod in made.pods.values():
                await made.end(pod)
