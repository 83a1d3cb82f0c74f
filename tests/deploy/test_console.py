"""The components of the console: its settings, its ways in, and what it may reach."""

from pathlib import Path

import pytest

from seqgate.services.console.config import ConsoleConfig
from tests.deploy.manifests import K8S, Manifests, read, render, selected
from tests.deploy.test_manifests import checkov, faults, kustomization, lets

WAYS = ("console-gateway", "console-ingress")


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory, way: str) -> Manifests:
    folder = tmp_path_factory.mktemp("console") / "all"
    chosen = ("certificates", "mtls", "network-policies", "prometheus", "tokens", way)
    return Manifests(read(render(kustomization(folder, chosen))))


def test_its_documents_pass_kubernetes_validate_and_checkov(
    manifests: Manifests, tmp_path: Path
) -> None:
    mine = [each for each in manifests.documents if "console" in each["metadata"]["name"]]
    kinds = {"Certificate", "Deployment", "Service", "NetworkPolicy"}
    assert {each["kind"] for each in mine} >= kinds
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


def test_its_way_in_leads_to_it_under_its_origin(manifests: Manifests, way: str) -> None:
    workload = manifests.workload("console")
    if way == "console-ingress":
        (rule,) = manifests.get("Ingress", "seqgate-console")["spec"]["rules"]
        (path,) = rule["http"]["paths"]
        host, backend = rule["host"], path["backend"]["service"]
        name = backend["port"]["name"]
    else:
        route = manifests.get("TLSRoute", "seqgate-console")["spec"]
        (listener,) = manifests.get("Gateway", "seqgate-console")["spec"]["listeners"]
        assert [listener["hostname"]] == route["hostnames"]
        assert listener["tls"] == {"mode": "Passthrough"}
        ((backend,),) = (each["backendRefs"] for each in route["rules"])
        host, name = listener["hostname"], "https"
        assert backend["port"] == 7707
    assert workload.variables()["SEQGATE_CONSOLE_ORIGIN"].value == f"https://{host}"
    service = manifests.get("Service", backend["name"])["spec"]
    assert selected(service["selector"], workload.template["metadata"]["labels"])
    (port,) = (each for each in service["ports"] if each["name"] == name)
    listen = workload.variables()["SEQGATE_CONSOLE_LISTEN"].value
    assert listen == f"0.0.0.0:{workload.ports[port['targetPort']]}"
    for probe in workload.probes.values():
        assert (probe["httpGet"]["port"], probe["httpGet"]["scheme"]) == ("https", "HTTPS")


def test_its_certificate_is_issued_for_its_service_and_has_no_rights(
    manifests: Manifests,
) -> None:
    certificate = manifests.get("Certificate", "seqgate-console")["spec"]
    secrets = {
        each["secret"]["secretName"]: each["name"]
        for each in manifests.workload("console").template["spec"]["volumes"]
        if "secret" in each
    }
    assert certificate["secretName"] in secrets
    assert "seqgate-console.seqgate.svc" in certificate["dnsNames"]
    assert {"server auth", "client auth"} <= {*certificate["usages"]}
    (uri,) = certificate["uris"]
    assert uri not in (K8S / "components" / "mtls" / "access.toml").read_text()


def test_prometheus_scrapes_it(manifests: Manifests) -> None:
    workload = manifests.workload("console")
    listen = workload.variables()["SEQGATE_CONSOLE_METRICS_LISTEN"].value
    assert listen == f"0.0.0.0:{workload.ports['metrics']}"


def test_services_let_it_in(manifests: Manifests) -> None:
    mine = manifests.workload("console").template["metadata"]["labels"]
    policies = [each["spec"] for each in manifests.of_kind("NetworkPolicy")]
    for service in ("ledger", "dedup", "cursor", "dispatcher", "filter"):
        target = manifests.workload(service)
        labels, port = target.template["metadata"]["labels"], target.ports["grpc"]
        assert lets(policies, "egress", "to", mine, labels, port)
        assert lets(policies, "ingress", "from", labels, mine, port)
