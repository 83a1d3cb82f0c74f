"""Services with the environment and the files of their manifests, probed as the kubelet probes."""

from pathlib import Path

import pytest

from seqgate.client import connect
from seqgate.errors import PermissionDeniedError
from seqgate.tls import TLS
from tests.deploy.manifests import SERVICES
from tests.deploy.pods import Node, installed
from tests.support.authority import Authority, Files


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
        files = authority.issue(secret, uris=each["spec"].get("uris", ()), hosts=["127.0.0.1"])
        made[secret] = files
        node.secrets[secret] = {
            "tls.crt": files.certificate.read_bytes(),
            "tls.key": files.key.read_bytes(),
            "ca.crt": authority.file.read_bytes(),
        }
    return made


async def test_production_certificates_authorize_their_holders(tmp_path: Path) -> None:
    async with installed("prod", tmp_path) as node:
        authority = Authority(tmp_path / "authority")
        shown = certificates(node, authority)
        await node.start(*SERVICES)
        await node.ready()
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
