"""The manifests, rendered as `kubectl apply -k` renders them, and read as a kubelet reads them."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import yaml

K8S = Path(__file__).resolve().parents[2] / "deploy" / "k8s"
OVERLAYS = ("dev", "prod")

WORKLOADS = ("Deployment", "StatefulSet", "Job", "CronJob")
SERVICES = ("ledger", "dedup", "cursor", "dispatcher", "filter")

Document = dict[str, Any]

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read(text: str) -> list[Document]:
    """The documents of a YAML text."""
    return [each for each in yaml.load_all(text, Loader=_LOADER) if each]


def render(folder: Path, kubectl: str = "") -> str:
    """The output of a kustomization, by the kustomize or kubectl in PATH, or by this kubectl."""
    tool = shutil.which("kustomize")
    command = [tool, "build"] if tool and not kubectl else [kubectl or "kubectl", "kustomize"]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    return done.stdout


def render_all(folders: Sequence[Path], kubectl: str = "") -> list[str]:
    """The outputs of many kustomizations, rendered two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda folder: render(folder, kubectl), folders))


def components(within: Path = K8S) -> list[str]:
    return sorted(each.name for each in (within / "components").iterdir() if each.is_dir())


def assert_restricted(pod: Document) -> None:
    """A pod's specification meets the Pod Security Standard, and more."""
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
        }


class Manifests:
    """Rendered documents, by kind and name."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = list(documents)

    def of_kind(self, *kinds: str) -> list[Document]:
        return [each for each in self.documents if each["kind"] in kinds]

    def get(self, kind: str, name: str) -> Document:
        """The only document with this kind and name, possibly with a hash appended."""
        found = [
            each
            for each in self.of_kind(kind)
            if re.fullmatch(rf"{re.escape(name)}(-[a-z0-9]{{10}})?", each["metadata"]["name"])
        ]
        assert len(found) == 1, f"{kind} {name}: {len(found)}"
        return found[0]

    def workload(self, component: str) -> "Workload":
        found = [
            each
            for each in self.of_kind("Deployment", "StatefulSet")
            if labels_of(each)["app.kubernetes.io/component"] == component
        ]
        assert len(found) == 1, component
        return Workload(self, found[0])

    def workloads(self) -> list["Workload"]:
        """All workloads, jobs included."""
        return [Workload(self, each) for each in self.of_kind(*WORKLOADS)]


class Variable(NamedTuple):
    """A variable of a container, and its source."""

    value: str
    source: str


class Workload:
    """A workload with one main container, and perhaps sidecars."""

    def __init__(self, manifests: Manifests, document: Document) -> None:
        self.manifests = manifests
        self.document = document
        self.name: str = document["metadata"]["name"]
        self.component: str = labels_of(document)["app.kubernetes.io/component"]

    def __repr__(self) -> str:
        return f"{self.document['kind']}/{self.name}"

    @property
    def template(self) -> Document:
        spec: Document = self.document["spec"]
        if self.document["kind"] == "CronJob":
            spec = spec["jobTemplate"]["spec"]
        template: Document = spec["template"]
        return template

    @property
    def pod(self) -> Document:
        pod: Document = self.template["spec"]
        return pod

    @property
    def container(self) -> Document:
        return self.containers[0]

    @property
    def containers(self) -> list[Document]:
        containers: list[Document] = self.pod["containers"]
        return containers

    @property
    def instances(self) -> int:
        """The number of pods with their own data; 1 if there is none."""
        spec = self.document["spec"]
        return int(spec["replicas"]) if "volumeClaimTemplates" in spec else 1

    @property
    def initial(self) -> list[Document]:
        """The containers that run before the others, one after the other."""
        containers: list[Document] = self.pod.get("initContainers", [])
        return containers

    @property
    def ports(self) -> dict[str, int]:
        ports = (port for each in self.containers for port in each.get("ports", ()))
        return {each["name"]: each["containerPort"] for each in ports}

    @property
    def probes(self) -> dict[str, Document]:
        kinds = ("startupProbe", "livenessProbe", "readinessProbe")
        return {kind: self.container[kind] for kind in kinds if kind in self.container}

    def variables(
        self, pod_name: str = "", container: Document | None = None, pod_ip: str = "127.0.0.1"
    ) -> dict[str, Variable]:
        """The environment of a container, if not the main one, as the kubelet makes it. Fields of
        the pod are taken from the manifests."""
        container = container or self.container
        namespace = self.document["metadata"].get("namespace", "default")
        name = pod_name or f"{self.name}-0"
        fields = {
            "metadata.name": name,
            "metadata.namespace": namespace,
            "status.podIP": pod_ip,
        }
        made: dict[str, Variable] = {}
        for each in container.get("envFrom", ()):
            config = self.manifests.get("ConfigMap", each["configMapRef"]["name"])
            source = f"ConfigMap {config['metadata']['name']}"
            made |= {key: Variable(value, source) for key, value in config["data"].items()}
        for each in container.get("env", ()):
            if "value" in each:
                value = _expanded(each["value"], made)
            else:
                value = fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            made[each["name"]] = Variable(value, str(self))
        return made

    def arguments(self, variables: Mapping[str, Variable]) -> list[str]:
        """The container's arguments, with variables expanded."""
        return [_expanded(each, variables) for each in self.container.get("args", ())]

    def mounts(self) -> Iterator[tuple[str, Document]]:
        """The mount paths and their volumes."""
        volumes = {each["name"]: each for each in self.pod.get("volumes", ())}
        for claim in self.document["spec"].get("volumeClaimTemplates", ()):
            volumes[claim["metadata"]["name"]] = {"persistentVolumeClaim": claim}
        for mount in self.container.get("volumeMounts", ()):
            yield mount["mountPath"], volumes[mount["name"]]


def labels_of(document: Document) -> dict[str, str]:
    labels: dict[str, str] = document["metadata"]["labels"]
    return labels


def is_of_postgres(host: str, manifests: Manifests) -> bool:
    """Whether a host is the Service that CloudNativePG makes for the primary."""
    clusters = manifests.of_kind("Cluster")
    return host.partition(".")[0] in {f"{each['metadata']['name']}-rw" for each in clusters}


def selected(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


def _expanded(text: str, variables: Mapping[str, Variable]) -> str:
    def value(found: re.Match[str]) -> str:
        return variables[found[1]].value

    return re.sub(r"\$\(([A-Z_]+)\)", value, text)
