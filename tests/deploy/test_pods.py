"""Services with the environment and the files of their manifests, probed as the kubelet probes."""

import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from seqgate.client import connect
from seqgate.dev.postgres_server import USER, postgres_binaries
from seqgate.errors import PermissionDeniedError
from seqgate.tls import TLS
from tests.deploy.manifests import SERVICES
from tests.deploy.pods import Node, installed
from tests.deploy.secure_valkey import PASSWORD, secure_valkey
from tests.support.authority import Authority, Files
from tests.support.postgres_server import PostgresServer, admin
from tests.support.tls_front import tls_for_postgres, tls_for_valkey


async def test_probes_follow_the_start_and_stop_of_services(tmp_path: Path) -> None:
    async with installed("dev", tmp_path) as node:
        await node.start("ledger", "filter")
        ledger = node.pods["ledger"]
        for probe in ("startupProbe", "livenessProbe"):
            await ledger.becomes(probe)
        # Without its dependencies the ledger is not ready, but it stays alive.
        assert not await ledger.probe("readinessProbe")
        assert await ledger.probe("livenessProbe")
        await node.start("dedup", "cursor", "dispatcher")
        assert set(node.pods) == set(SERVICES)
        await node.ready()
        assert await node.pods["dedup"].terminate() == 0
        await ledger.becomes("readinessProbe", answering=False)
        assert await ledger.probe("livenessProbe")
        for component in ("dispatcher", "ledger", "cursor", "filter"):
            assert await node.pods[component].terminate() == 0


def certificates(node: Node, authority: Authority) -> dict[str, Files]:
    """Create the certificates that cert-manager would, in the Secrets; here every host is
    127.0.0.1."""
    made = {}
    for each in node.manifests.of_kind("Certificate"):
        secret = each["spec"]["secretName"]
        files = authority.issue(
            secret,
            uris=each["spec"].get("uris", ()),
            hosts=["127.0.0.1"],
            cn=each["spec"].get("commonName", "somebody"),
        )
        made[secret] = files
        node.secrets[secret] = {
            "tls.crt": files.certificate.read_bytes(),
            "tls.key": files.key.read_bytes(),
            "ca.crt": authority.file.read_bytes(),
        }
    return made


@asynccontextmanager
async def postgres_of(
    node: Node, authority: Authority, server: Files, folder: Path
) -> AsyncIterator[None]:
    """The primary that the manifests' Cluster asks for, with its roles and databases; and a standby
    that flushes what it receives."""
    (cluster,) = node.manifests.of_kind("Cluster")
    (other,) = node.manifests.of_kind("Database")
    primary = PostgresServer(folder / "data", {"synchronous_standby_names": "pg_receivewal"})
    (folder / "received").mkdir()
    receive = [str(postgres_binaries() / "pg_receivewal"), "--synchronous", "--username", USER]
    receive += ["--directory", str(folder / "received")]
    receive += ["--host", "127.0.0.1", "--port", str(primary.port)]
    initial = cluster["spec"]["bootstrap"]["initdb"]
    wanted = {initial["database"]: initial["owner"], other["spec"]["name"]: other["spec"]["owner"]}
    async with AsyncExitStack() as stack:
        stack.callback(primary.kill)
        primary.start()
        standby = subprocess.Popen(receive, stderr=subprocess.DEVNULL)
        stack.callback(standby.wait)
        stack.callback(standby.kill)
        async with admin(primary.url()) as connection:
            for database, role in wanted.items():
                await connection.execute(f"CREATE ROLE {role} LOGIN")
                await connection.execute(f"CREATE DATABASE {database} OWNER {role}")
        node.besides["postgres"] = await stack.enter_async_context(
            tls_for_postgres(primary.port, server, authority.file)
        )
        yield


async def test_production_certificates_authorize_their_holders(tmp_path: Path) -> None:
    async with installed("prod", tmp_path) as node:
        authority = Authority(tmp_path / "authority")
        shown = certificates(node, authority)
        node.secrets["seqgate-valkey-auth"] = {"password": PASSWORD.encode()}
        async with AsyncExitStack() as stack:
            valkey = stack.enter_context(secure_valkey(tmp_path / "valkey"))
            node.besides["valkey"] = await stack.enter_async_context(
                tls_for_valkey(valkey, shown["seqgate-valkey-tls"])
            )
            await stack.enter_async_context(
                postgres_of(node, authority, shown["seqgate-postgres-tls"], tmp_path)
            )
            await node.start(*SERVICES)
            await node.ready()
            await check_rights(node, authority, shown)
            for component in ("dispatcher", "ledger", "dedup", "cursor"):
                assert await node.pods[component].terminate() == 0


async def check_rights(node: Node, authority: Authority, shown: dict[str, Files]) -> None:
    ledger = f"127.0.0.1:{node.port('ledger', 7702)}"
    dispatcher = f"127.0.0.1:{node.port('dispatcher', 7704)}"

    def as_somebody(files: Files) -> TLS:
        return TLS(authority.file, files.certificate, files.key)

    operator = as_somebody(shown["seqgate-operator-tls"])
    async with connect(ledger, dispatcher=dispatcher, tls=operator) as client:
        async with client.producer("orders", name="p") as producer:
            await producer.send(b"first")
        async with client.consumer("orders", "s") as consumer:
            message = await consumer.receive()
            assert message.payload == b"first"
            await consumer.ack(message)
    stranger = as_somebody(authority.issue("stranger", uris=["spiffe://seqgate/stranger"]))
    async with connect(ledger, dispatcher=dispatcher, tls=stranger) as client:
        with pytest.raises(PermissionDeniedError):
            async with client.producer("orders", name="q") as producer:
                await producer.send(b"second")
