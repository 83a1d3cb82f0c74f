"""The manifests render in every combination, with the properties that a cluster needs."""

import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import kubernetes_validate
import pytest
import yaml

from seqgate.cli._settings import FILES
from seqgate.services.dedup.redis_url import parse_redis_url
from seqgate.services.runtime.access import Access, Role
from seqgate.spark._traced import executor_settings
from seqgate.telemetry.setup import FLUSH_TIMEOUT_S
from tests.deploy.foreign import faults_of, is_foreign, validators
from tests.deploy.manifests import (
    K8S,
    OVERLAYS,
    SERVICES,
    Document,
    Manifests,
    Workload,
    assert_restricted,
    components,
    is_of_postgres,
    labels_of,
    read,
    render,
    render_all,
    selected,
)
from tests.deploy.test_settings import config_type, names_of
from tests.support.depth import some_of

_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

KUBERNETES = ("1.28", "1.37")
"""The oldest version that the manifests are for, and the newest."""

SECURITY = ("insecure", "mtls")
"""Exactly one of these components is used."""

REDIS = ("external-redis", "redis-cluster", "redis-sentinel")
"""At most one of these components is used."""

STORES = ("cloudnative-pg", "postgresql")
"""At most one of these components is used."""

VALKEY_TLS = ("external-redis", "redis-cluster", "valkey-tls")
"""Neither of the first two is used with the last one."""

OUTSIDE = ("gateway", "load-balancer", "outside")
"""At most one of these components is used."""

CONSOLE = ("console", "console-gateway", "console-ingress")
"""At most one of these components is used."""

REQUIRED = {
    **dict.fromkeys(OUTSIDE, ()),
    "telemetry-tls": ("mtls", "prometheus", "tracing"),
    "tokens": ("mtls",),
    "ca-bundle": ("mtls",),
    **dict.fromkeys(CONSOLE, ("mtls", "tokens")),
}
"""Components that change others, which come before them."""

ALTERNATIVES = (SECURITY, REDIS, STORES, VALKEY_TLS, OUTSIDE, CONSOLE)

SKIPPED = {
    "CKV_K8S_43": "who installs builds the images, and says their digests in an overlay",
    "CKV_K8S_15": "a tag is a version: a node that has it starts pods without the registry",
}
"""Skipped checks of checkov, with reasons."""

PROBED = 7709
"""The port for probes, which do not support TLS."""

FOR_JOBS = {
    *(f"SEQGATE_{name.upper()}" for name in SERVICES),
    *(f"SEQGATE_{name.upper()}" for name in FILES),
}
"""The variables that jobs and the command line read."""


@pytest.fixture(scope="session", params=["base", *OVERLAYS])
def manifests(request: pytest.FixtureRequest) -> Manifests:
    """The base, and each overlay."""
    folder = K8S if request.param == "base" else K8S / "overlays"
    return Manifests(read(render(folder / request.param)))


def combinations() -> Iterator[tuple[str, ...]]:
    """Valid sets of components: every pair, and everything with each choice of alternatives."""
    every = components()
    for pair in itertools.combinations(every, 2):
        chosen = {*pair, *(each for one in pair for each in REQUIRED.get(one, ()))}
        if is_valid(chosen):
            yield tuple(sorted({*chosen, *(() if chosen & {*SECURITY} else SECURITY[:1])}))
    others = {*every}.difference(*ALTERNATIVES)
    for security, redis, store in itertools.product(SECURITY, (*REDIS, "valkey-tls"), STORES):
        fitting = {each for each in others if is_valid({security, *REQUIRED.get(each, ())})}
        for outside, console in zip(OUTSIDE[:2], CONSOLE[1:], strict=True):
            consoles = {console} if is_valid({security, *REQUIRED[console]}) else set()
            yield tuple(sorted({security, redis, store, outside, *consoles, *fitting}))


def is_valid(chosen: set[str]) -> bool:
    return all(len(chosen & {*group}) <= 1 for group in ALTERNATIVES)


def kustomization(folder: Path, chosen: tuple[str, ...], within: Path = K8S) -> Path:
    """Create a folder with the base and these components."""
    folder.mkdir()
    chosen = tuple(sorted(chosen, key=lambda each: (each in REQUIRED, each)))
    place = os.path.relpath(within, folder)
    document = {
        "namespace": "seqgate",
        "resources": [f"{place}/base"],
        "components": [f"{place}/components/{each}" for each in chosen],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(document))
    return folder


def faults(document: Document) -> list[str]:
    """Violations of the schema of Kubernetes, or of the project that defines the kind."""
    if is_foreign(document):
        return faults_of(document)
    found = []
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{version}: {document['kind']} {document['metadata']['name']}: {error}")
    return found


@pytest.mark.timeout(300)
def test_every_combination_renders_and_passes_kubernetes_validate_and_checkov(
    tmp_path: Path,
) -> None:
    folders = [
        kustomization(tmp_path / str(number), chosen)
        for number, chosen in enumerate(some_of(list(combinations()), every=60))
    ]
    folders += [K8S / "overlays" / each for each in OVERLAYS]
    rebuild = K8S / "rebuild"
    every = tuple(components(rebuild))
    folders += [rebuild / "overlays" / each for each in OVERLAYS]
    folders += [kustomization(tmp_path / "rebuild", every, rebuild)]
    texts = {text for rendered in render_all(folders) for text in rendered.split("\n---\n")}
    different = [document for text in sorted(texts) for document in read(text)]
    assert [fault for each in different for fault in faults(each)] == []
    assert checkov(different, tmp_path / "all.yaml") == []


def checkov(documents: list[Document], file: Path) -> list[str]:
    """The failed checks, with their places."""
    file.write_text(yaml.dump_all(documents, Dumper=_DUMPER))
    tool = Path(sys.prefix) / "checkov" / "bin" / "checkov"
    options = "--framework kubernetes --output json --quiet --compact --skip-download"
    skipped = ["--skip-check", ",".join(SKIPPED)]
    done = subprocess.run(
        [tool, "--file", file, *options.split(), *skipped],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    said = json.loads(done.stdout)
    assert said["summary"]["parsing_errors"] == 0
    assert said["summary"]["passed"] > len(documents)
    return [
        f"{each['check_id']} {each['check_name']}: {each['resource']}"
        for each in said["results"]["failed_checks"]
    ]


def test_a_kind_of_another_project_is_refused_with_a_field_that_its_schema_lacks(
    tmp_path: Path,
) -> None:
    left_out = {"insecure", *REDIS[1:], *STORES[1:], *VALKEY_TLS[2:], *OUTSIDE[1:]}
    left_out |= {*CONSOLE} - {"console-gateway"}
    chosen = tuple(each for each in components() if each not in left_out)
    rebuild = K8S / "rebuild"
    rendered = read(render(kustomization(tmp_path / "all", chosen)))
    rendered += read(
        render(kustomization(tmp_path / "rebuild", tuple(components(rebuild)), rebuild))
    )
    foreign = [each for each in rendered if is_foreign(each)]
    assert {(each["apiVersion"], each["kind"]) for each in foreign} == validators().keys()
    for each in foreign:
        assert faults(each) == []
        each["spec"]["unknown"] = {}
        assert any("unknown" in fault for fault in faults(each))


def test_variables_are_existing_settings(manifests: Manifests) -> None:
    for workload in manifests.workloads():
        known = names_of(workload.component) if workload.component in SERVICES else FOR_JOBS
        prefixed = {name for name in workload.variables() if name.startswith("SEQGATE_")}
        assert prefixed <= {*known, f"SEQGATE_{workload.component.upper()}_CONFIG_FILE"}
        assert workload.pod["enableServiceLinks"] is False, "a Service's variables are no settings"


def test_values_are_valid_for_their_services(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for service in SERVICES:
        with monkeypatch.context() as patch:
            for name, variable in manifests.workload(service).variables().items():
                patch.setenv(name, variable.value)
            config_type(service)()


def test_ports_are_those_of_the_services(manifests: Manifests) -> None:
    for service in SERVICES:
        workload = manifests.workload(service)
        variables = workload.variables()
        prefix = f"SEQGATE_{service.upper()}_"
        listens = {
            "grpc": variables[prefix + "LISTEN"].value,
            "health": variables[prefix + "HEALTH_LISTEN"].value,
            "metrics": variables[prefix + "METRICS_LISTEN"].value,
        }
        assert {name: f"0.0.0.0:{port}" for name, port in workload.ports.items()} == listens
        default = config_type(service).model_fields["listen"].default
        assert default == f"127.0.0.1:{workload.ports['grpc']}"
        ports = {probe["grpc"]["port"] for probe in workload.probes.values()}
        assert ports == {PROBED} == {workload.ports["health"]}


ADDRESS = re.compile(r"(?:dns:///|redis://)?([a-z0-9.-]*seqgate-[a-z0-9.-]+):([0-9]{4,5})\b")


def test_addresses_resolve_to_ports_of_selected_pods(manifests: Manifests) -> None:
    seen = 0
    for workload in manifests.workloads():
        for name, variable in workload.variables().items():
            for host, port in ADDRESS.findall(variable.value):
                if is_of_postgres(host, manifests):
                    continue
                target = reached(manifests, host, int(port))
                seen += 1
                if name.endswith("_TARGET") or name in FOR_JOBS:
                    called = name.removesuffix("_TARGET").rpartition("_")[2].lower()
                    assert target.component == called
                if name.endswith("_ADVERTISE"):
                    assert target.component == workload.component
    assert seen >= 8


def reached(manifests: Manifests, host: str, port: int) -> Workload:
    """The workload that listens at an address, by the manifests."""
    labels = host.split(".")
    services = {each["metadata"]["name"]: each for each in manifests.of_kind("Service")}
    (service,) = (services[each] for each in labels if each in services)
    (entry,) = (each for each in service["spec"]["ports"] if each["port"] == port)
    (workload,) = (
        each
        for each in manifests.workloads()
        if selected(service["spec"]["selector"], each.template["metadata"]["labels"])
    )
    # Headless: the port is the pod's, whatever the Service declares.
    assert service["spec"]["clusterIP"] == "None"
    assert workload.ports[entry["targetPort"]] == port
    if labels[0] not in services:  # the name of one pod
        assert workload.document["spec"]["serviceName"] == service["metadata"]["name"]
        assert labels[0].rpartition("-")[0] == workload.name
    return workload


def test_a_pods_grace_period_covers_its_services_drain(manifests: Manifests) -> None:
    for service in SERVICES:
        workload = manifests.workload(service)
        values = workload.variables()

        def seconds(name: str, service: str = service, values: Any = values) -> float:
            given = values.get(f"SEQGATE_{service.upper()}_{name.upper()}")
            return float(given.value if given else config_type(service).model_fields[name].default)

        # A command: Kubernetes knows the handler `sleep` from 1.30 on only.
        command, sleep = workload.container["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        # Streams move or are cut, and unary calls end; then the rest is saved, and the remaining
        # metrics and spans are exported: services/*/app.py, runtime/process.py.
        takes = float(sleep) + 2 * seconds("drain_timeout_s") + 3 * seconds("stop_grace_s")
        takes += 2 * FLUSH_TIMEOUT_S
        assert workload.pod["terminationGracePeriodSeconds"] > takes


def test_probes_allow_time_to_open_a_store(manifests: Manifests) -> None:
    for service in SERVICES:
        workload = manifests.workload(service)
        probes = workload.probes
        assert set(probes) == {"startupProbe", "livenessProbe", "readinessProbe"}
        assert probes["startupProbe"]["grpc"]["service"] == "liveness"
        assert probes["livenessProbe"]["grpc"]["service"] == "liveness"
        assert "service" not in probes["readinessProbe"]["grpc"]
        patience_s = (
            probes["startupProbe"]["periodSeconds"] * probes["startupProbe"]["failureThreshold"]
        )
        assert patience_s >= (3600 if "/data" in dict(workload.mounts()) else 60)


def test_pods_are_restricted(manifests: Manifests) -> None:
    (namespace,) = manifests.of_kind("Namespace")
    assert labels_of(namespace)["pod-security.kubernetes.io/enforce"] == "restricted"
    for workload in manifests.workloads():
        assert_restricted(workload.pod)


def test_only_the_hand_over_of_a_certificate_has_a_token(manifests: Manifests) -> None:
    accounts = {each["metadata"]["name"]: each for each in manifests.of_kind("ServiceAccount")}
    assert all(each["automountServiceAccountToken"] is False for each in accounts.values())
    for workload in manifests.workloads():
        pod = workload.pod
        assert pod["serviceAccountName"] in accounts
        handing = workload.component == "rebuild-certificate"
        assert pod["automountServiceAccountToken"] is handing


def test_workloads_have_limits_and_disruption_budgets(
    manifests: Manifests,
) -> None:
    budgets = manifests.of_kind("PodDisruptionBudget")
    for workload in manifests.workloads():
        resources = workload.container["resources"]
        assert {"cpu", "memory"} == resources["requests"].keys() == resources["limits"].keys()
        if workload.component not in (*SERVICES, "valkey"):
            continue
        labels = workload.template["metadata"]["labels"]
        (budget,) = (
            each["spec"]
            for each in budgets
            if selected(each["spec"]["selector"]["matchLabels"], labels)
        )
        assert budget["maxUnavailable"] == 1


def test_stores_keep_their_data_and_have_priority(manifests: Manifests) -> None:
    (priority,) = manifests.of_kind("PriorityClass")
    for component in ("ledger", "cursor", "valkey"):
        workload = manifests.workload(component)
        spec = workload.document["spec"]
        assert workload.pod["priorityClassName"] == priority["metadata"]["name"]
        if component != "valkey" and is_on_postgres(workload):
            continue
        assert spec["persistentVolumeClaimRetentionPolicy"] == {
            "whenDeleted": "Retain",
            "whenScaled": "Retain",
        }
        assert dict(workload.mounts()).keys() >= {"/data"}
        if component != "valkey":
            path = workload.variables()[f"SEQGATE_{component.upper()}_STORE_PATH"].value
            assert path.startswith("/data/")


def is_on_postgres(workload: Workload) -> bool:
    return any(path == "/etc/seqgate/postgres" for path, _ in workload.mounts())


@pytest.mark.parametrize("component", STORES)
def test_on_postgresql_instances_have_names_and_no_volumes(
    tmp_path: Path, component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = kustomization(tmp_path / "rendered", ("mtls", "certificates", component))
    manifests = Manifests(read(render(folder)))
    (tmp_path / "postgres.toml").write_text('postgres_url = "postgresql://user:secret@host/name"')
    for service in ("ledger", "cursor"):
        workload = manifests.workload(service)
        spec = workload.document["spec"]
        assert spec["replicas"] >= 2
        assert "volumeClaimTemplates" not in spec
        assert "/data" not in dict(workload.mounts())
        names = manifests.get("Service", spec["serviceName"])["spec"]
        assert (names["clusterIP"], names["publishNotReadyAddresses"]) == ("None", True)
        called = manifests.get("Service", f"seqgate-{service}")["spec"]
        assert (called["clusterIP"], called.get("publishNotReadyAddresses")) == ("None", None)
        (migration,) = workload.initial
        assert migration["args"] == [*workload.container["args"], "--migrate"]
        for same in ("image", "env", "envFrom", "securityContext"):
            assert migration.get(same) == workload.container.get(same)
        variables = workload.variables()
        with monkeypatch.context() as patch:
            for name, variable in variables.items():
                is_file = name.endswith("_CONFIG_FILE")
                patch.setenv(name, str(tmp_path / "postgres.toml") if is_file else variable.value)
            config: Any = config_type(service)()
        assert config.postgres_url
        assert config.postgres_standby_required
        assert not config.postgres_migrates
        if service == "ledger":
            assert config.advertise == f"seqgate-ledger-0.{spec['serviceName']}.seqgate.svc:7702"


def test_services_are_roles_of_the_cluster_by_certificates(tmp_path: Path) -> None:
    folder = kustomization(tmp_path / "rendered", ("mtls", "certificates", "cloudnative-pg"))
    manifests = Manifests(read(render(folder)))
    (cluster,) = manifests.of_kind("Cluster")
    asked = cluster["spec"]
    made = {asked["bootstrap"]["initdb"]["database"]: asked["bootstrap"]["initdb"]["owner"]}
    for each in manifests.of_kind("Database"):
        assert each["spec"]["cluster"]["name"] == cluster["metadata"]["name"]
        made[each["spec"]["name"]] = each["spec"]["owner"]
    certificates = {
        each["spec"]["secretName"]: each["spec"] for each in manifests.of_kind("Certificate")
    }
    assert asked["instances"] == 3
    assert asked["postgresql"]["pg_hba"][-1] == "host all all all reject"
    for service in ("ledger", "cursor"):
        workload = manifests.workload(service)
        url = urlsplit(workload.variables()[f"SEQGATE_{service.upper()}_POSTGRES_URL"].value)
        assert made[url.path[1:]] == url.username
        assert url.password is None
        rule = f"hostssl {url.path[1:]} {url.username} all cert"
        assert rule in asked["postgresql"]["pg_hba"]
        (secret,) = (
            volume["secret"]["secretName"]
            for path, volume in workload.mounts()
            if path == "/etc/seqgate/postgres"
        )
        assert certificates[secret]["commonName"] == url.username
        options = dict(parse_qsl(url.query))
        assert options.pop("sslmode") == "verify-full"
        assert options == {
            "sslrootcert": "/etc/seqgate/postgres/ca.crt",
            "sslcert": "/etc/seqgate/postgres/tls.crt",
            "sslkey": "/etc/seqgate/postgres/tls.key",
        }
    issuers = {
        name: each["issuerRef"]["name"]
        for name, each in certificates.items()
        if not each.get("isCA")
    }
    of_postgres = {name for name, issuer in issuers.items() if issuer == "seqgate-postgres"}
    assert of_postgres == {
        *asked["certificates"].values(),
        *("seqgate-ledger-postgres", "seqgate-cursor-postgres"),
    }


def test_certificates_cover_the_names_of_their_services(tmp_path: Path) -> None:
    chosen = ("mtls", "certificates", "cloudnative-pg")
    manifests = Manifests(read(render(kustomization(tmp_path / "mtls", chosen))))
    certificates = {
        each["spec"]["secretName"]: each["spec"] for each in manifests.of_kind("Certificate")
    }
    for workload in manifests.workloads():
        for path, volume in workload.mounts():
            if path == "/etc/seqgate/tls":
                secret = volume["secret"]["secretName"]
                holder = workload.component.removesuffix("-certificate")
                assert f"spiffe://seqgate/{holder}" in certificates[secret]["uris"]
        for variable in workload.variables().values():
            for host, port in ADDRESS.findall(variable.value):
                if is_of_postgres(host, manifests):
                    (cluster,) = manifests.of_kind("Cluster")
                    secret = cluster["spec"]["certificates"]["serverTLSSecret"]
                    assert host in certificates[secret]["dnsNames"]
                    continue
                target = reached(manifests, host, int(port))
                if target.component == "valkey":
                    continue
                names = certificates[f"seqgate-{target.component}-tls"]["dnsNames"]
                wildcard = "*." + host.partition(".")[2]
                assert host in names or wildcard in names, host


def test_roles_are_granted_to_the_names_of_certificates(tmp_path: Path) -> None:
    chosen = ("mtls", "certificates")
    manifests = Manifests(read(render(kustomization(tmp_path / "mtls", chosen))))
    text = manifests.get("ConfigMap", "seqgate-access")["data"]["access.toml"]
    parsed = Access.parse(tomllib.loads(text))
    named = {
        f"uri:{uri}"
        for each in manifests.of_kind("Certificate")
        for uri in each["spec"].get("uris", ())
    }
    given = {name for names in parsed.services.values() for name in names}
    given |= {name for rule in parsed.rules for name in rule.principals}
    assert given <= named
    assert {role.value for role in parsed.services} == {each.value for each in Role}


def test_services_find_the_keys_of_tokens_and_the_authorities_of_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ("mtls", "certificates", "tokens", "ca-bundle")
    manifests = Manifests(read(render(kustomization(tmp_path / "rendered", chosen))))
    from_bundle = {"tls.crt": "secret", "tls.key": "secret", "ca.crt": "configMap"}
    (handing_over,) = (
        each for each in manifests.workloads() if each.component == "rebuild-certificate"
    )
    assert files_of(dict(handing_over.mounts())["/etc/seqgate/tls"]) == from_bundle
    for service in SERVICES:
        workload = manifests.workload(service)
        with monkeypatch.context() as patch:
            for name, variable in workload.variables().items():
                patch.setenv(name, variable.value)
            config: Any = config_type(service)()
        mounts = dict(workload.mounts())
        assert mounts["/etc/seqgate/tokens"]["configMap"]["name"] == "seqgate-token-keys"
        assert str(config.jwt_keys_file.parent) in mounts
        held = files_of(mounts["/etc/seqgate/tls"])
        assert held == from_bundle
        for file in (config.tls_certificate_file, config.tls_key_file, config.tls_client_ca_file):
            assert file.name in held
            assert str(file.parent) == "/etc/seqgate/tls"


def files_of(volume: Document) -> dict[str, str]:
    """The files of a projected volume, and the kind of each one's source."""
    return {
        item["path"]: next(iter(source))
        for source in volume["projected"]["sources"]
        for each in source.values()
        for item in each["items"]
    }


def test_jobs_and_the_toolbox_export_traces_like_the_services(tmp_path: Path) -> None:
    chosen = ("insecure", "tracing", "toolbox")
    manifests = Manifests(read(render(kustomization(tmp_path / "traced", chosen))))
    jobs = kustomization(tmp_path / "jobs", ("tracing",), K8S / "rebuild")
    rebuild = Manifests(read(render(jobs)))
    asked_for = {
        workload.component: otel_variables(workload)
        for workload in (*manifests.workloads(), *rebuild.workloads())
        if workload.component in {*SERVICES, "rebuild", "toolbox"}
    }
    name = "OTEL_EXPORTER_OTLP_ENDPOINT"
    assert asked_for["ledger"][name] == "http://seqgate-collector:4317"
    there = {name: "http://seqgate-collector.seqgate.svc:4317"}
    assert asked_for.pop("rebuild") == asked_for["ledger"] | there
    assert asked_for == dict.fromkeys((*SERVICES, "toolbox"), asked_for["ledger"])
    asked_for["rebuild"] = asked_for["ledger"] | there
    passed_on = executor_settings(
        asked_for["rebuild"]
        | {"SEQGATE_LEDGER": "elsewhere", "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret"}
    )
    assert passed_on == {
        f"spark.executorEnv.{name}": value for name, value in asked_for["rebuild"].items()
    }


def otel_variables(workload: Workload) -> dict[str, str]:
    return {
        name: each.value for name, each in workload.variables().items() if name.startswith("OTEL_")
    }


@pytest.mark.parametrize("besides", ["", "redis-cluster", "redis-sentinel", "cloudnative-pg"])
def test_network_policies_allow_the_connections_of_the_settings(
    tmp_path: Path, besides: str
) -> None:
    chosen = ("insecure", "network-policies", "toolbox", *filter(None, [besides]))
    manifests = Manifests(read(render(kustomization(tmp_path / "policies", chosen))))
    policies = [each["spec"] for each in manifests.of_kind("NetworkPolicy")]
    (closed,) = (
        each["metadata"]["name"]
        for each in manifests.of_kind("NetworkPolicy")
        if "ingress" not in each["spec"] and "egress" not in each["spec"]
    )
    everybody = manifests.get("NetworkPolicy", closed)["spec"]["podSelector"]["matchLabels"]
    for workload in manifests.workloads():
        assert selected(everybody, workload.template["metadata"]["labels"]), workload
        for name, variable in workload.variables().items():
            if name == "SEQGATE_LEDGER_ADVERTISE":  # for callers; ledgers do not call each other
                continue
            for host, port in ADDRESS.findall(variable.value):
                caller = workload.template["metadata"]["labels"]
                if is_of_postgres(host, manifests):
                    called = {"cnpg.io/cluster": host.removesuffix("-rw")}
                else:
                    called = reached(manifests, host, int(port)).template["metadata"]["labels"]
                assert lets(policies, "egress", "to", caller, called, int(port)), host
                assert lets(policies, "ingress", "from", called, caller, int(port)), host
    valkey = manifests.workload("valkey")
    among_themselves = valkey.ports.values() if valkey.document["spec"]["replicas"] > 1 else ()
    for port in among_themselves:
        labels = valkey.template["metadata"]["labels"]
        assert lets(policies, "egress", "to", labels, labels, port)
        assert lets(policies, "ingress", "from", labels, labels, port)


def test_network_policies_allow_names_to_be_asked_of_any_address(tmp_path: Path) -> None:
    """A cache on the node has the address of no pod."""
    manifests = Manifests(read(render(kustomization(tmp_path / "p", ("network-policies",)))))
    names = manifests.get("NetworkPolicy", "seqgate-names")["spec"]
    assert names["podSelector"] == {"matchLabels": {"app.kubernetes.io/part-of": "seqgate"}}
    (rule,) = names["egress"]
    assert "to" not in rule
    ports = {(each["protocol"], each["port"]) for each in rule["ports"]}
    assert ports >= {("UDP", 53), ("TCP", 53)}


@pytest.mark.parametrize("way", ["load-balancer", "gateway"])
def test_clients_outside_reach_every_instance_by_the_name_that_they_are_told(
    tmp_path: Path, way: str
) -> None:
    chosen = ("mtls", "certificates", "network-policies", "cloudnative-pg", way)
    manifests = Manifests(read(render(kustomization(tmp_path / way, chosen))))
    policies = [each["spec"] for each in manifests.of_kind("NetworkPolicy")]
    served = {each["metadata"]["name"]: each for each in manifests.of_kind("Service")}
    doors = dict(ways_in(manifests, served))
    for service in ("ledger", "dispatcher"):
        workload = manifests.workload(service)
        (names,) = (
            each["spec"]["dnsNames"]
            for each in manifests.of_kind("Certificate")
            if each["spec"]["secretName"] == f"seqgate-{service}-tls"
        )
        port = workload.ports["grpc"]
        assert opens_to_all(policies, workload, port)
        told: dict[str, str | None] = {f"{service}.seqgate.example": None}
        for number in range(workload.document["spec"]["replicas"]):
            pod = f"{workload.name}-{number}"
            host, _, shown = workload.variables(pod)[
                f"SEQGATE_{service.upper()}_ADVERTISE"
            ].value.rpartition(":")
            assert int(shown) == port
            told[host] = pod
        for host, instance in told.items():
            assert host in names or f"*.{host.partition('.')[2]}" in names
            spec = doors[host, port]["spec"]
            labels = {**workload.template["metadata"]["labels"]}
            if instance is not None:
                labels["statefulset.kubernetes.io/pod-name"] = instance
                assert spec["publishNotReadyAddresses"] is True
                assert spec["selector"]["statefulset.kubernetes.io/pod-name"] == instance
            assert selected(spec["selector"], labels)
            assert [each["port"] for each in spec["ports"]] == [port]


def ways_in(
    manifests: Manifests, served: dict[str, Document]
) -> Iterator[tuple[tuple[str, int], Document]]:
    """The Services that clients outside reach, by name and port."""
    for each in served.values():
        if each["spec"].get("type") == "LoadBalancer":
            name = each["metadata"]["annotations"]["external-dns.alpha.kubernetes.io/hostname"]
            yield (name, each["spec"]["ports"][0]["port"]), each
    listeners = {
        each["name"]: each
        for gateway in manifests.of_kind("Gateway")
        for each in gateway["spec"]["listeners"]
    }
    for route in manifests.of_kind("TLSRoute"):
        (name,) = route["spec"]["hostnames"]
        listener = listeners[route["spec"]["parentRefs"][0]["sectionName"]]
        assert listener["tls"] == {"mode": "Passthrough"}
        assert listener["hostname"] in (name, f"*.{name.partition('.')[2]}")
        (backend,) = route["spec"]["rules"][0]["backendRefs"]
        assert backend["port"] == listener["port"]
        yield (name, listener["port"]), served[backend["name"]]


def opens_to_all(policies: list[Document], workload: Workload, port: int) -> bool:
    return any(
        {"ipBlock": {"cidr": "0.0.0.0/0"}} in rule["from"] and rule["ports"][0]["port"] == port
        for policy in policies
        if selects(policy["podSelector"], workload.template["metadata"]["labels"])
        for rule in policy.get("ingress", ())
    )


def lets(
    policies: list[Document],
    way: str,
    side: str,
    one: dict[str, str],
    other: dict[str, str],
    port: int,
) -> bool:
    """Whether a policy for `one` admits the `other` at this port."""
    return any(
        any(each["port"] == port for each in rule["ports"])
        and (
            side not in rule  # anywhere
            or any(
                selects(peer.get("podSelector", {}), other)
                for peer in rule[side]
                if not peer.get("namespaceSelector") and "ipBlock" not in peer
            )
        )
        for policy in policies
        if selects(policy["podSelector"], one)
        for rule in policy.get(way, ())
    )


def selects(selector: Document, labels: dict[str, str]) -> bool:
    return selected(selector.get("matchLabels", {}), labels) and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ())
    )


@pytest.mark.parametrize("redis", ["redis-cluster", "redis-sentinel"])
def test_several_servers_are_as_restricted_as_one(tmp_path: Path, redis: str) -> None:
    base = Manifests(read(render(K8S / "base"))).workload("valkey")
    manifests = Manifests(read(render(kustomization(tmp_path / redis, ("insecure", redis)))))
    valkey = manifests.workload("valkey")
    assert valkey.pod["securityContext"] == base.pod["securityContext"]
    for container in valkey.containers:
        assert container["image"] == base.container["image"]
        assert container["securityContext"] == base.container["securityContext"]
        resources = container["resources"]
        assert {"cpu", "memory"} == resources["requests"].keys() == resources["limits"].keys()
    # Fields that cannot be changed in place: the resource would have to be deleted first.
    for fixed in ("serviceName", "selector", "volumeClaimTemplates"):
        assert valkey.document["spec"][fixed] == base.document["spec"][fixed]
    assert "podManagementPolicy" not in valkey.document["spec"]
    service = manifests.get("Service", valkey.document["spec"]["serviceName"])
    assert service["spec"]["publishNotReadyAddresses"] is True
    variables = manifests.workload("dedup").variables()
    nodes = parse_redis_url(variables["SEQGATE_DEDUP_REDIS_URL"].value).nodes
    pods = [f"{valkey.name}-{number}.{service['metadata']['name']}" for number in range(3)]
    assert [node.host for node in nodes] == pods


def test_images_are_of_this_version(root: Path, manifests: Manifests) -> None:
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    images = {each.container["image"] for each in manifests.workloads()}
    ours = {each for each in images if "/seqgate" in each}
    assert len(ours) == 1
    others = {each.rpartition(":")[0].rpartition("/")[2] for each in images - ours}
    assert others - {"opentelemetry-collector"} == {"valkey"}
    assert {each.rpartition(":")[2] for each in ours} == {version}


def test_pods_are_spread_as_the_cluster_allows(manifests: Manifests) -> None:
    for component in (*SERVICES, "valkey"):
        workload = manifests.workload(component)
        spread = workload.pod["topologySpreadConstraints"]
        assert {each["topologyKey"]: each["whenUnsatisfiable"] for each in spread} == {
            "topology.kubernetes.io/zone": "ScheduleAnyway"
        }
        ((kind, (apart,)),) = workload.pod["affinity"]["podAntiAffinity"].items()
        assert kind == "preferredDuringSchedulingIgnoredDuringExecution"
        assert apart["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
        labels = workload.template["metadata"]["labels"]
        for selector in (apart["podAffinityTerm"], *spread):
            chosen = selector["labelSelector"]["matchLabels"]
            assert selected(chosen, labels)
            assert chosen["app.kubernetes.io/component"] == component


def test_the_production_overlay_denies_by_default() -> None:
    manifests = Manifests(read(render(K8S / "overlays" / "prod")))
    certificates = {
        each["spec"]["secretName"]: each["spec"].get("dnsNames", ())
        for each in manifests.of_kind("Certificate")
    }
    (endpoint,) = manifests.of_kind("PodMonitor")[0]["spec"]["podMetricsEndpoints"]
    for service in SERVICES:
        values = {
            name.removeprefix(f"SEQGATE_{service.upper()}_"): each.value
            for name, each in manifests.workload(service).variables().items()
        }
        assert "ALLOW_INSECURE" not in values
        assert "TLS_CLIENT_CA_FILE" in values
        assert (values["METRICS_TLS"], endpoint["scheme"]) == ("true", "https")
        names = certificates[f"seqgate-{service}-tls"]
        assert endpoint["tlsConfig"]["serverName"] in names
        assert values["OTEL_EXPORTER_OTLP_ENDPOINT"].startswith("https://")
        assert values["OTEL_EXPORTER_OTLP_CERTIFICATE"] == values["TLS_CLIENT_CA_FILE"]
        if service == "dedup":
            assert values["REDIS_URL"].startswith("rediss://")
            assert values["REDIS_PASSWORD_FILE"]
    collector = manifests.get("ConfigMap", "seqgate-collector")["data"]
    settings = yaml.safe_load(collector["collector-config.yaml"])
    (plain,) = read((K8S / "components" / "tracing" / "collector-config.yaml").read_text())
    assert settings["receivers"]["otlp"]["protocols"]["grpc"].pop("tls")["cert_file"]
    assert settings["exporters"]["otlp"]["tls"].pop("ca_file")
    assert settings["exporters"]["otlp"]["tls"].pop("reload_interval")
    assert settings == plain, "a copy, since an overlay cannot edit a part"
    assert collector["OTLP_BACKEND_INSECURE"] == "false"
    assert manifests.of_kind("NetworkPolicy")
