"""The image: built as deploy/docker/build.sh builds it, and run as the manifests demand."""

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from signal import SIGKILL

import pytest

from seqgate.client import connect
from seqgate.dev.child import Child, start_process, tell
from tests.deploy.manifests import SERVICES, Variable, Workload
from tests.deploy.pods import Node, Pod, installed

pytestmark = pytest.mark.timeout(3600)
"""The first build may create a Debian image and install all packages."""

UID = 10001


@pytest.fixture(scope="session")
def containers(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables for buildah and podman: a store in build/image, kept for the next run, and limits
    that this machine allows."""
    store = root / "build" / "image"
    folder = tmp_path_factory.mktemp("containers")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    settings = [
        "[containers]",
        f'default_ulimits = ["nofile={hard}:{hard}", "nproc=32768:32768"]',
        "[engine]",
        *(['runtime = "runc"'] if shutil.which("runc") else []),
        'cgroup_manager = "cgroupfs"',
        'events_logger = "file"',
    ]
    (folder / "containers.conf").write_text("\n".join(settings))
    storage = [
        "[storage]",
        'driver = "overlay"',
        f'graphroot = "{store / "store"}"',
        f'runroot = "{folder / "run"}"',
    ]
    (folder / "storage.conf").write_text("\n".join(storage))
    return {
        **os.environ,
        "BUILDER": "buildah",
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "ULIMITS": f"--ulimit nofile={hard}:{hard} --ulimit nproc=32768:32768",
    }


@pytest.fixture(scope="session")
def images(root: Path, containers: dict[str, str]) -> tuple[str, str]:
    """The images of the services and of the jobs."""
    options = ["--network", "host", *containers["ULIMITS"].split()]
    done = subprocess.run(
        ["deploy/docker/build.sh", "--tag", "tested", "--", *options],
        cwd=root,
        env=containers,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5_000:]
    services, jobs = done.stdout.split()
    return services, jobs


class Containers(Node):
    """A node where pods are containers of the image."""

    image = ""
    environment: Mapping[str, str] = {}

    async def run(
        self, name: str, workload: Workload, variables: Mapping[str, Variable], log: int
    ) -> Child:
        container, pod = workload.container["securityContext"], workload.pod["securityContext"]
        command = ["podman", "run", "--network", "host", "--name", _container(name)]
        command += ["--user", f"{pod['runAsUser']}:{pod['runAsGroup']}"]
        command += ["--read-only"] * container["readOnlyRootFilesystem"]
        command += ["--read-only-tmpfs=false", "--security-opt", "no-new-privileges"]
        for each in container["capabilities"]["drop"]:
            command += ["--cap-drop", each]
        for path, volume in workload.mounts():
            folder = self.volume(name, path)
            os.chown(folder, UID, UID)
            read_only = "configMap" in volume or "secret" in volume
            command += ["--volume", f"{folder}:{path}" + ":ro" * read_only]
        for key, variable in variables.items():
            command += ["--env", f"{key}={variable.value}"]
        command += [self.image, *workload.arguments(variables)]
        return await start_process(command, log, self.environment)

    async def end(self, pod: Pod) -> None:
        remove(self.environment, _container(pod.name))
        tell(pod.process, SIGKILL)
        await pod.process.wait()


def _container(pod: str) -> str:
    return f"seqgate-{pod}-{os.getpid()}"


def output(containers: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The output of a container, removed afterwards: with --rm, podman may lose its exit status."""
    name = f"seqgate-output-{os.getpid()}"
    command = ["podman", "run", "--name", name, "--read-only", "--network", "host", *arguments]
    try:
        return subprocess.run(command, env=containers, capture_output=True, text=True, check=False)
    finally:
        remove(containers, name)


def remove(containers: Mapping[str, str], name: str) -> None:
    subprocess.run(
        ["podman", "rm", "--force", "--ignore", name],
        env=containers,
        stdout=subprocess.DEVNULL,
        check=True,
    )


async def test_every_service_and_job_runs_from_the_image(
    images: tuple[str, str], containers: dict[str, str], tmp_path: Path
) -> None:
    services, jobs = images

    class Here(Containers):
        image, environment = services, containers

    async with installed("dev", tmp_path, Here) as node:
        await node.start(*SERVICES)
        await node.ready()
        addresses = {
            name: f"127.0.0.1:{node.port(name, node.manifests.workload(name).ports['grpc'])}"
            for name in SERVICES
        }
        async with connect(addresses["ledger"], dispatcher=addresses["dispatcher"]) as client:
            async with client.producer("orders", name="p") as producer:
                await producer.send(b"first")
            async with client.consumer("orders", "s") as consumer:
                message = await consumer.receive()
                assert message.payload == b"first"
                await consumer.ack(message)
        audit = ["/opt/seqgate/jobs/job.py", "seqgate.jobs.audit", "--json"]
        quiet = ["--conf", "spark.ui.enabled=false", "--conf", "spark.log.level=WARN"]
        submit = ["submit", "--master", "local[2]", *quiet, *audit]
        submit += ["--ledger", addresses["ledger"]]
        done = output(containers, jobs, *submit)
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout.splitlines()[-1])
        assert (summary["kind"], summary["messages"], summary["findings"]) == ("summary", 1, 0)
        for component in ("dispatcher", "ledger", "dedup", "cursor", "filter"):
            assert await node.pods[component].terminate() == 0


def test_the_image_has_no_build_tools_and_runs_unprivileged(
    images: tuple[str, str], containers: dict[str, str]
) -> None:
    for image in images:
        done = output(
            containers,
            "--entrypoint",
            "sh",
            image,
            "-c",
            "id -u; command -v pip pip3 gcc make apt-get perl",
        )
        assert done.stdout.split() == [str(UID)]
        assert "No module named pip" in output(containers, image, "-m", "pip").stderr
        help_ = output(containers, image)
        assert help_.returncode == 0
        assert "seqgate [OPTIONS] COMMAND" in help_.stdout
        bill = output(containers, "--entrypoint", "cat", image, "/opt/seqgate/sbom.cdx.json")
        assert "grpcio" in {each["name"] for each in json.loads(bill.stdout)["components"]}
