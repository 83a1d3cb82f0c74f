"""The component console: its settings, its way in, and what it may reach."""

from pathlib import Path

import pytest

from seqgate.services.console.config import ConsoleConfig
from tests.deploy.manifests import Manifests, read, render, selected
from tests.deploy.test_manifests import checkov, faults, kustomization, lets


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    folder = tmp_path_factory.mktemp("console") / "all"
    chosen = ("certificates", "console", "mtls", "network-policies", "tokens")
    return Manifests(read(render(kustomization(folder, chosen))))


def test_its_documents_pass_kubernetes_validate_and_checkov(
    manifests: Manifests, tmp_path: Path
) -> None:
    mine = [each for each in manifests.documents if "console" in each["metadata"]["name"]]
    assert {each["kind"] for each in mine} >= {"Deployment", "Service", "Ingress", "NetworkPolicy"}
    assert [fault for each in mine for fault in faults(each)] == []
    assert checkov(mine, tmp_path / "all.yaml") == []


def test_readers_sign_in_with_tokens_over_tls(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, variable in manifests.workload("console").variables().items():
        monkeypatch.setenv(name, variable.value)
    config = ConsoleConfig()
    config.check()
    assert (config.credentials, config.allow_insecure) == ("token", False)
    assert config.tls_certificate_file is not None
    mounted = [path for path, _ in manifests.workload("console").mounts()]
    assert str(config.tls_certificate_file.parent) in mounted


def test_its_ingress_leads_to_it_under_its_origin(manifests: Manifests) -> None:
    workload = manifests.workload("console")
    (rule,) = manifests.get("Ingress", "seqgate-console")["spec"]["rules"]
    origin = workload.variables()["SEQGATE_CONSOLE_ORIGIN"].value
    assert origin == f"https://{rule['host']}"
    (path,) = rule["http"]["paths"]
    named = path["backend"]["service"]
    service = manifests.get("Service", named["name"])["spec"]
    assert selected(service["selector"], workload.template["metadata"]["labels"])
    (port,) = (each for each in service["ports"] if each["name"] == named["port"]["name"])
    listen = workload.variables()["SEQGATE_CONSOLE_LISTEN"].value
    assert listen == f"0.0.0.0:{workload.ports[port['targetPort']]}"
    for probe in workload.probes.values():
        assert (probe["httpGet"]["port"], probe["httpGet"]["scheme"]) == ("https", "HTTPS")


def test_services_let_it_in(manifests: Manifests) -> None:
    mine = manifests.workload("console").template["metadata"]["labels"]
    policies = [each["spec"] for each in manifests.of_kind("NetworkPolicy")]
    for service in ("ledger", "dedup", "cursor", "dispatcher", "filter"):
        target = manifests.workload(service)
        labels, port = target.template["metadata"]["labels"], target.ports["grpc"]
        assert lets(policies, "egress", "to", mine, labels, port)
        assert lets(policies, "ingress", "from", labels, mine, port)
