"""The rebuild: its settings, its rights, and its Job, run as its manifests say over a small API
server, with the driver and its executors as processes."""

import os
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from redis.asyncio import Redis

from seqgate.client import connect
from seqgate.dev.stack import Stack
from seqgate.spark._java import find_java, wrapped
from tests.deploy.api_server import ApiServer
from tests.deploy.manifests import (
    K8S,
    Document,
    Manifests,
    Workload,
    assert_restricted,
    labels_of,
    read,
    render,
)
from tests.support.authority import Authority
from tests.support.spark_classes import java_options
from tests.support.waiting import eventually

REBUILD = K8S / "rebuild"
OVERLAYS = ("dev", "prod")

ENTRYPOINT = K8S.parent / "docker" / "entrypoint.py"
JOB = K8S.parent / "docker" / "job.py"
HANDOVER = K8S / "components" / "certificates" / "handover.py"

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"

FIXED = {
    "spark.log.level": "WARN",
    "spark.pyspark.python": "/opt/seqgate/bin/python",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.eventLog.enabled": "false",
    "spark.kubernetes.trust.certificates": "false",
    "spark.kubernetes.driver.connectionTimeout": "10000",
    "spark.kubernetes.driver.requestTimeout": "30000",
    "spark.kubernetes.executor.useDriverPodIP": "false",
    "spark.driver.port": "7078",
    "spark.driver.blockManager.port": "7079",
    "spark.blockManager.port": "7079",
    "spark.port.maxRetries": "0",
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.saslFallback": "false",
    "spark.network.timeout": "120s",
    "spark.executor.heartbeatInterval": "10s",
    "spark.kubernetes.allocation.pods.allocator": "direct",
    "spark.kubernetes.executor.disableConfigMap": "true",
    "spark.kubernetes.driver.service.deleteOnTermination": "false",
    "spark.kubernetes.driver.ownPersistentVolumeClaim": "false",
    "spark.kubernetes.driver.reusePersistentVolumeClaim": "false",
    "spark.kubernetes.executor.deleteOnTermination": "true",
    "spark.kubernetes.executor.enableApiPolling": "true",
    "spark.kubernetes.executor.enableApiWatcher": "true",
    "spark.kubernetes.local.dirs.tmpfs": "false",
    "spark.dynamicAllocation.enabled": "false",
    "spark.decommission.enabled": "false",
    "spark.kubernetes.executor.request.cores": "1",
    "spark.kubernetes.executor.limit.cores": "2",
    "spark.scheduler.minRegisteredResourcesRatio": "0.5",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "30s",
    "spark.executor.maxNumFailures": "20",
    "spark.executor.failuresValidityInterval": "10m",
    "spark.task.maxFailures": "8",
}
"""Settings that Spark would decide by a default, for the Job and for an operator alike."""

OF_THE_JOB = {
    "spark.app.name": "seqgate-rebuild",
    "spark.master": "k8s://https://kubernetes.default.svc",
    "spark.submit.deployMode": "client",
    "spark.kubernetes.authenticate.caCertFile": f"{ACCOUNT}/ca.crt",
    "spark.kubernetes.authenticate.oauthTokenFile": f"{ACCOUNT}/token",
    "spark.kubernetes.authenticate.executor.serviceAccountName": "seqgate-rebuild-executor",
    "spark.kubernetes.executor.podTemplateFile": "/etc/seqgate/rebuild/executor.yaml",
    "spark.kubernetes.executor.podTemplateContainerName": "executor",
    "spark.kubernetes.container.image.pullPolicy": "IfNotPresent",
    "spark.executor.instances": "2",
    "spark.executor.cores": "1",
    "spark.driver.memory": "1g",
    "spark.executor.memory": "1g",
    "spark.executor.memoryOverhead": "1g",
}

ARGUMENTS = {
    "spark.driver.host": "10.0.0.1",
    "spark.driver.bindAddress": "10.0.0.1",
    "spark.kubernetes.driver.pod.name": "seqgate-rebuild-1-abcde",
    "spark.kubernetes.executor.podNamePrefix": "seqgate-rebuild-1-abcde",
}
"""What differs from pod to pod, for a pod with this name and address."""

JOB_FIELDS = {
    "completions": 1,
    "parallelism": 1,
    "backoffLimit": 3,
    "activeDeadlineSeconds": 14_400,
    "ttlSecondsAfterFinished": 3_600,
}
POD_FIELDS = {
    "restartPolicy": "Never",
    "serviceAccountName": "seqgate-rebuild",
    "automountServiceAccountToken": False,
    "enableServiceLinks": False,
    "terminationGracePeriodSeconds": 30,
}
"""Fields that Kubernetes would decide by a default."""


def rebuild_of(overlay: str) -> Manifests:
    return Manifests(read(render(REBUILD / "overlays" / overlay)))


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def manifests(overlay: str) -> Manifests:
    return rebuild_of(overlay)


@pytest.fixture(scope="module")
def beside(overlay: str) -> Manifests:
    """The installation beside which it is."""
    return Manifests(read(render(K8S / "overlays" / overlay)))


def job_of(manifests: Manifests) -> Workload:
    (job,) = (each for each in manifests.workloads() if each.component == "rebuild")
    return job


def properties(manifests: Manifests) -> dict[str, str]:
    text = manifests.get("ConfigMap", "seqgate-rebuild")["data"]["rebuild.properties"]
    lines = [line.split(None, 1) for line in text.splitlines() if line and line[0] != "#"]
    return dict(lines)


def namespaces(manifests: Manifests) -> set[str]:
    return {
        each["metadata"]["name" if each["kind"] == "Namespace" else "namespace"]
        for each in manifests.documents
        if each["kind"] != "PriorityClass"
    }


def kustomization(folder: Path, *chosen: str) -> Manifests:
    """The rebuild's base with these components."""
    folder.mkdir()
    place = os.path.relpath(REBUILD, folder)
    document = {
        "namespace": "seqgate-rebuild",
        "resources": [f"{place}/base"],
        "components": [f"{place}/components/{each}" for each in chosen],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(document))
    return Manifests(read(render(folder)))


def test_no_setting_is_left_to_a_default_of_spark_or_kubernetes(manifests: Manifests) -> None:
    assert properties(manifests) == FIXED | OF_THE_JOB
    job = job_of(manifests)
    variables = job.variables("seqgate-rebuild-1-abcde", pod_ip="10.0.0.1")
    arguments = job.arguments(variables)
    given = dict(after.split("=", 1) for before, after in pairwise(arguments) if before == "--conf")
    (namespace,) = namespaces(manifests)
    image = job.container["image"]
    there = {"spark.kubernetes.namespace": namespace, "spark.kubernetes.container.image": image}
    assert given == ARGUMENTS | there
    spec = job.document["spec"]["jobTemplate"]["spec"]
    assert spec.items() >= JOB_FIELDS.items()
    assert job.pod.items() >= POD_FIELDS.items()
    mounts = dict(job.mounts())
    (token, trusted) = mounts[ACCOUNT]["projected"]["sources"]
    lasts_s = token["serviceAccountToken"]["expirationSeconds"]
    assert lasts_s >= JOB_FIELDS["activeDeadlineSeconds"], "Spark reads its token once"
    assert trusted["configMap"]["name"] == "kube-root-ca.crt"
    assert set(mounts) >= {"/etc/seqgate/rebuild", "/tmp"}


def test_an_operator_gets_the_same_settings(tmp_path: Path) -> None:
    manifests = kustomization(tmp_path / "operator", "mtls", "spark-operator")
    (application,) = manifests.of_kind("SparkApplication")
    spec = application["spec"]
    assert spec["sparkConf"] == FIXED
    job = job_of(manifests)
    assert spec["image"] == job.container["image"]
    assert {each["name"]: each["mountPath"] for each in spec["driver"]["volumeMounts"]} == {
        "tmp": "/tmp",
        "tls": "/etc/seqgate/tls",
        "token": ACCOUNT,
    }
    (token,) = (each for each in spec["volumes"] if each["name"] == "token")
    assert token["projected"] == dict(job.mounts())[ACCOUNT]["projected"]
    (secret,) = (each["secret"] for each in spec["volumes"] if "secret" in each)
    assert secret["secretName"] == "seqgate-rebuild-tls"
    addresses = manifests.get("ConfigMap", "seqgate-addresses")["metadata"]["name"]
    for side in ("driver", "executor"):
        assert spec[side]["envFrom"] == [{"configMapRef": {"name": addresses}}]
        assert spec[side]["podSecurityContext"]["fsGroup"] == 10001
        assert spec[side]["labels"]["seqgate-client"] == "true"
    accounts = {spec[side]["serviceAccount"] for side in ("driver", "executor")}
    assert accounts <= {each["metadata"]["name"] for each in manifests.of_kind("ServiceAccount")}


def test_its_service_accounts_have_no_rights_in_the_namespace_of_seqgate(
    manifests: Manifests, beside: Manifests
) -> None:
    (its,) = namespaces(manifests)
    (seqgates,) = namespaces(beside)
    assert its != seqgates, "a pod may mount any Secret of its namespace"
    everything = Manifests([*manifests.documents, *beside.documents])
    assert not everything.of_kind("ClusterRole", "ClusterRoleBinding")
    accounts = [each["metadata"]["name"] for each in manifests.of_kind("ServiceAccount")]
    assert accounts == ["seqgate-rebuild", "seqgate-rebuild-executor"]
    granted = []
    for binding in everything.of_kind("RoleBinding"):
        for subject in binding["subjects"]:
            if subject["namespace"] == its:
                assert binding["metadata"]["namespace"] == its
                role = everything.get(binding["roleRef"]["kind"], binding["roleRef"]["name"])
                assert role["metadata"]["namespace"] == its
                granted.append((subject["name"], role["rules"]))
    verbs = ["get", "list", "watch", "create", "patch", "delete", "deletecollection"]
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": verbs}
    assert granted == [("seqgate-rebuild", [pods])]


def test_its_namespace_has_nothing_but_what_its_pods_may_read(
    manifests: Manifests, overlay: str
) -> None:
    secrets = {each["metadata"]["name"] for each in manifests.of_kind("Secret", "Certificate")}
    assert secrets == ({"seqgate-rebuild-tls"} if overlay == "prod" else set())
    configs = {
        each["metadata"]["name"].rpartition("-")[0] for each in manifests.of_kind("ConfigMap")
    }
    assert configs == {"seqgate-addresses", "seqgate-rebuild"}


def test_the_certificate_is_handed_over_by_an_account_that_may_do_nothing_else() -> None:
    manifests, seqgate = rebuild_of("prod"), Manifests(read(render(K8S / "overlays" / "prod")))
    (its,) = namespaces(manifests)
    (job,) = (each for each in seqgate.workloads() if each.component == "rebuild-certificate")
    assert job.variables()["REBUILD_NAMESPACE"].value == its
    role = manifests.get("Role", "seqgate-rebuild-certificate")
    name = manifests.get("Secret", "seqgate-rebuild-tls")["metadata"]["name"]
    rule = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [name]}
    assert role["rules"] == [rule | {"verbs": ["patch"]}]
    binding = manifests.get("RoleBinding", "seqgate-rebuild-certificate")
    account = {"kind": "ServiceAccount", "name": job.pod["serviceAccountName"]}
    assert binding["subjects"] == [account | {"namespace": job.document["metadata"]["namespace"]}]
    source = dict(job.mounts())["/etc/seqgate/tls"]["secret"]["secretName"]
    certificate = seqgate.get("Certificate", "seqgate-rebuild")["spec"]
    assert certificate["secretName"] == source == name
    # The rebuild's pods wait until it is there.
    wanted = dict(job_of(manifests).mounts())["/etc/seqgate/tls"]["secret"]
    assert wanted["secretName"] == name
    assert {each["key"] for each in wanted["items"]} == {"ca.crt", "tls.crt", "tls.key"}
    assert "optional" not in wanted


def test_executors_use_the_credentials_of_the_driver(tmp_path: Path) -> None:
    manifests = kustomization(tmp_path / "mtls", "mtls")
    driver = job_of(manifests)
    shown = {
        name: each.value for name, each in driver.variables().items() if name.endswith("_FILE")
    }
    assert len(shown) == 3
    config = manifests.get("ConfigMap", "seqgate-rebuild")["data"]
    executor = yaml.safe_load(config["executor.yaml"])["spec"]
    (container,) = executor["containers"]
    assert {each["name"]: each["value"] for each in container["env"]} == shown
    assert dict(driver.mounts())["/etc/seqgate/tls"] in executor["volumes"]


def test_templates_of_executors_differ_only_by_the_certificate() -> None:
    base = yaml.safe_load((REBUILD / "base" / "settings" / "executor.yaml").read_text())
    mtls = yaml.safe_load((REBUILD / "components" / "mtls" / "executor.yaml").read_text())
    (container,) = mtls["spec"]["containers"]
    del container["env"]
    for each in (container["volumeMounts"], mtls["spec"]["volumes"]):
        assert each.pop()["name"] == "tls"
    assert mtls == base


def test_addresses_are_services_of_the_installation_beside(
    manifests: Manifests, beside: Manifests
) -> None:
    (namespace,) = namespaces(beside)
    addresses = manifests.get("ConfigMap", "seqgate-addresses")["data"]
    for service in ("ledger", "dedup", "cursor"):
        (entry,) = beside.get("Service", f"seqgate-{service}")["spec"]["ports"]
        host = f"seqgate-{service}.{namespace}.svc"
        assert addresses[f"SEQGATE_{service.upper()}"] == f"dns:///{host}:{entry['port']}"
        for certificate in beside.of_kind("Certificate"):
            if certificate["metadata"]["name"] == f"seqgate-{service}":
                assert host in certificate["spec"]["dnsNames"]


def test_its_image_is_of_this_version_and_its_executors_is_the_same(
    root: Path, manifests: Manifests
) -> None:
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    job = job_of(manifests)
    image = job.container["image"]
    assert image.endswith(f"/seqgate-jobs:{version}")
    assert job.variables()["EXECUTOR_IMAGE"].value == image


def test_its_pods_are_restricted(manifests: Manifests) -> None:
    config = manifests.get("ConfigMap", "seqgate-rebuild")["data"]
    job = job_of(manifests)
    assert_restricted(job.pod)
    assert_restricted(yaml.safe_load(config["executor.yaml"])["spec"])
    (namespace,) = manifests.of_kind("Namespace")
    assert labels_of(namespace)["pod-security.kubernetes.io/enforce"] == "restricted"
    for account in manifests.of_kind("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_a_rebuild_now_is_the_job_of_the_schedule(tmp_path: Path) -> None:
    manifests = kustomization(tmp_path / "now", "now")
    now = manifests.get("Job", "seqgate-rebuild-now")
    spec = manifests.get("CronJob", "seqgate-rebuild")["spec"]["jobTemplate"]["spec"]
    assert now["spec"] == spec


def test_policies_let_its_pods_reach_the_services_and_each_other() -> None:
    manifests, seqgate = rebuild_of("prod"), Manifests(read(render(K8S / "overlays" / "prod")))
    config = manifests.get("ConfigMap", "seqgate-rebuild")["data"]
    driver = labels_of(job_of(manifests).template)
    executor = labels_of(yaml.safe_load(config["executor.yaml"]))
    for caller in (driver, executor):
        for service in ("ledger", "dedup", "cursor"):
            workload = seqgate.workload(service)
            called = labels_of(workload.template)
            port = workload.ports["grpc"]
            assert admits(manifests, "egress", "to", caller, called, port, apart=True)
            assert admits(seqgate, "ingress", "from", called, caller, port, apart=True)
        collector = labels_of(seqgate.workload("collector").template)
        assert admits(manifests, "egress", "to", caller, collector, 4317, apart=True)
        assert admits(seqgate, "ingress", "from", collector, caller, 4317, apart=True)
        for other in (driver, executor):
            for port in (7078, 7079):
                assert admits(manifests, "egress", "to", caller, other, port, apart=False)
                assert admits(manifests, "ingress", "from", other, caller, port, apart=False)
        valkey = labels_of(seqgate.workload("valkey").template)
        assert not admits(seqgate, "ingress", "from", valkey, caller, 6379, apart=True)
    # Only the driver reaches the API server; names are asked for at any address.
    open_to_all = {
        policy["metadata"]["name"]: {each["port"] for each in rule["ports"]}
        for policy in manifests.of_kind("NetworkPolicy")
        for rule in policy["spec"].get("egress", ())
        if "to" not in rule
    }
    assert open_to_all == {"seqgate-names": {53, 5353}, "seqgate-rebuild-driver": {443, 6443}}


def admits(
    manifests: Manifests,
    way: str,
    side: str,
    one: dict[str, str],
    other: dict[str, str],
    port: int,
    *,
    apart: bool,
) -> bool:
    """Whether a policy for `one` admits the `other`, of another namespace if `apart`, at this
    port."""
    return any(
        any(each["port"] == port for each in rule["ports"])
        and any(
            peer["podSelector"]["matchLabels"].items() <= other.items()
            and ("namespaceSelector" in peer or not apart)
            and not peer.get("namespaceSelector")
            for peer in rule.get(side, ())
        )
        for policy in manifests.of_kind("NetworkPolicy")
        if policy["spec"]["podSelector"].get("matchLabels", {}).items() <= one.items()
        for rule in policy["spec"].get(way, ())
    )


def test_the_hand_over_writes_the_certificate_and_nothing_else(tmp_path: Path) -> None:
    with ApiServer(tmp_path / "api", _no_pods) as server:
        files = Authority(tmp_path / "authority").issue("rebuild")
        account = _account(tmp_path, server)
        tls = tmp_path / "tls"
        tls.mkdir()
        (tls / "ca.crt").write_text("the authority")
        (tls / "tls.crt").write_bytes(files.certificate.read_bytes())
        (tls / "tls.key").write_bytes(files.key.read_bytes())
        environment = {
            "REBUILD_NAMESPACE": "seqgate-rebuild",
            "ACCOUNT": str(account),
            "TLS": str(tls),
            "SERVER": server.url,
        }

        def handed_over() -> int:
            command = [sys.executable, str(HANDOVER)]
            return subprocess.run(command, env=environment, check=False).returncode

        assert handed_over() == 0, "without the rebuild's manifests there is nothing to do"
        server.secrets["seqgate-rebuild-tls"] = {}
        assert handed_over() == 0
        assert server.secrets == {
            "seqgate-rebuild-tls": {each.name: each.read_bytes() for each in tls.iterdir()}
        }
        asked = {(each.verb, each.resource, each.namespace) for each in server.asked}
        assert asked == {("patch", "secrets", "seqgate-rebuild")}


def _no_pods(pod: Document, address: str) -> subprocess.Popen[bytes]:
    raise AssertionError((pod, address))


class Executors:
    """Runs the pods of executors."""

    def __init__(self, folder: Path, java: Path, root: Path) -> None:
        self._folder = folder
        self._java = java
        self._root = root

    def __call__(self, pod: Document, address: str) -> subprocess.Popen[bytes]:
        (container,) = pod["spec"]["containers"]
        given: dict[str, str] = {}
        for each in container["env"]:
            field = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            known = {"status.podIP": address, "metadata.name": pod["metadata"]["name"]}
            given[each["name"]] = each.get("value", "") if field is None else known[field]
        local = self._folder / pod["metadata"]["name"]
        local.mkdir()
        given["SPARK_LOCAL_DIRS"] = str(local)
        with (local / "log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, str(ENTRYPOINT), *container["args"]],
                env={**_image(self._java, self._root), **given},
                stdout=log,
                stderr=log,
                cwd=local,
            )


def _image(java: Path, root: Path) -> dict[str, str]:
    """The image's variables."""
    return {"PATH": os.environ["PATH"], "JAVA_HOME": str(java), "PYTHONPATH": str(root)}


@pytest.mark.deep
@pytest.mark.timeout(600)
async def test_the_job_rebuilds_with_executors_and_only_the_rights_of_its_role(
    tmp_path: Path, root: Path
) -> None:
    found = find_java(os.environ)
    java = found.home if found.complete else wrapped(found, tmp_path / "java")
    manifests = Manifests(read(render(REBUILD / "base")))
    job = job_of(manifests)
    environment = {"SEQGATE_LEDGER_INLINE_REPLAY_ENTRIES_MAX": "1"}
    async with Stack(tmp_path / "stack", environment=environment) as stack:
        async with (
            connect(stack.address("ledger")) as client,
            client.producer("orders", name="p") as producer,
        ):
            for number in range(5):
                await producer.send(b"%d" % number, sequence_id=number)
        async with Redis.from_url(stack.redis_url) as redis:
            await redis.flushall()
        with ApiServer(tmp_path / "api", Executors(tmp_path, java, root)) as server:
            meta = {"name": f"{job.name}-1-abcde"}
            pod = server.add({"kind": "Pod", "apiVersion": "v1", "metadata": meta})
            command, variables = _driver(job, manifests, server, tmp_path, pod, stack)
            log = tmp_path / "driver.log"
            with log.open("wb") as output:
                environment = {**_image(java, root), **variables}
                driver = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            try:
                await eventually(
                    lambda: driver.poll() is not None, "the end of the driver", within_s=300
                )
            finally:
                driver.kill()
                driver.wait()
            assert driver.returncode == 0, log.read_text()
            assert set(server.pods) == {meta["name"]}, "the executors were deleted"
        _, *executors = server.ever
        assert len(executors) == 2
        for executor in executors:
            _check_executor(executor, pod, job)
        (role,) = manifests.of_kind("Role")
        (rule,) = role["rules"]
        for asked in server.asked:
            assert asked.resource in rule["resources"], asked
            assert asked.verb in rule["verbs"], asked
            assert asked.namespace == role["metadata"]["namespace"]
            assert asked.token == "Bearer the-driver"
        async with (
            connect(stack.address("ledger")) as client,
            client.producer("orders", name="p") as producer,
        ):
            assert [
                (await producer.send(b"%d" % number, sequence_id=number)).duplicate
                for number in range(6)
            ] == [True] * 5 + [False]


def _check_executor(executor: Document, driver: Document, job: Workload) -> None:
    """An executor belongs to the driver's pod, reaches it at its address, and is as restricted."""
    (owner,) = executor["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Pod", driver["metadata"]["name"])
    assert owner["uid"] == driver["metadata"]["uid"]
    labels = labels_of(executor)
    assert labels["app.kubernetes.io/component"] == "rebuild-executor"
    assert labels["seqgate-client"] == "true"
    spec = executor["spec"]
    (container,) = spec["containers"]
    assert container["image"] == job.container["image"]
    assert container["securityContext"] == job.container["securityContext"]
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "2048Mi"}
    url = {each["name"]: each.get("value") for each in container["env"]}["SPARK_DRIVER_URL"]
    address = driver["status"]["podIP"]
    assert url == f"spark://CoarseGrainedScheduler@{address}:{job.ports['driver']}"
    assert spec["serviceAccountName"] == "seqgate-rebuild-executor"
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"].items() >= {"runAsNonRoot": True}.items()
    volumes = {each["name"]: set(each) - {"name"} for each in spec["volumes"]}
    assert set().union(*volumes.values()) == {"emptyDir"}
    kept = {key: executor[key] for key in ("apiVersion", "kind", "metadata", "spec")}
    kubernetes_validate.validate(kept, "1.37", strict=True)


def _account(folder: Path, server: ApiServer) -> Path:
    """A service account's folder."""
    account = folder / "account"
    account.mkdir()
    (account / "token").write_text("the-driver")
    (account / "ca.crt").write_bytes(server.authority.file.read_bytes())
    return account


def _driver(
    job: Workload,
    manifests: Manifests,
    server: ApiServer,
    folder: Path,
    pod: Document,
    stack: Stack,
) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of the Job's container, with this machine's places."""
    mounted = folder / "mounted"
    mounted.mkdir()
    config = manifests.get("ConfigMap", "seqgate-rebuild")["data"]
    places = {
        "https://kubernetes.default.svc": server.url,
        ACCOUNT: str(_account(folder, server)),
        "/etc/seqgate/rebuild": str(mounted),
        "/opt/seqgate/bin/python": sys.executable,
        "/opt/seqgate/jobs/job.py": str(JOB),
    }

    def placed(text: str) -> str:
        for there, here in places.items():
            text = text.replace(there, here)
        return text

    for file, text in config.items():
        (mounted / file).write_text(placed(text))
    variables = job.variables(pod["metadata"]["name"], pod_ip=pod["status"]["podIP"])
    environment = {
        key: stack.address(key.removeprefix("SEQGATE_").lower())
        if key in ("SEQGATE_LEDGER", "SEQGATE_DEDUP", "SEQGATE_CURSOR")
        else each.value
        for key, each in variables.items()
    }
    arguments = [placed(each) for each in job.arguments(variables)]
    quick = " ".join(java_options())
    at = arguments.index("--properties-file")
    arguments[at:at] = ["--driver-java-options", f"{quick} -Djava.io.tmpdir={folder}"]
    return [sys.executable, str(ENTRYPOINT), *arguments], environment
