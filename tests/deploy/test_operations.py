"""backup.sh, restore.sh, upgrade.sh and enlarge.sh: run over a stand-in for kubectl that fails at
each call in turn, and then again."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.manifests import K8S, assert_restricted
from tests.support.depth import some_of

STANDIN = Path(__file__).parent / "kubectl.py"
STORES = ("cursor", "ledger")
NOTE = "seqgate/replicas-before-restore"
OLD, NEW = b"what was there", b"SQLite format 3\0and what was backed up"
IMAGE = "registry.example/seqgate@sha256:0"
REPLICAS = {
    "statefulset/seqgate-dispatcher": 3,
    "statefulset/seqgate-ledger": 1,
    "deployment/seqgate-dedup": 4,  # as many as an autoscaler wanted
    "statefulset/seqgate-cursor": 1,
}


class Cluster:
    """A namespace with Seqgate, two Valkeys, and a backup."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backup = folder / "backup"
        self.file = folder / "cluster.json"
        programs = folder / "bin"
        for each in (self.backup, programs, *(folder / "data" / store for store in STORES)):
            each.mkdir(parents=True)
        kubectl = programs / "kubectl"
        kubectl.write_text(f'#!/bin/sh\nexec {sys.executable} -ISB {STANDIN} "$@"\n')
        kubectl.chmod(0o755)
        objects: dict[str, dict[str, Any]] = {
            name: {"replicas": count, "image": IMAGE} for name, count in REPLICAS.items()
        }
        objects |= {"pod/seqgate-valkey-0": {}, "pod/seqgate-valkey-1": {}}
        objects |= {"namespace/seqgate": {}, "storageclass/fast": {"allowVolumeExpansion": "true"}}
        for store in STORES:
            claim = {"storageClassName": "fast", "storage": "1Gi"}
            objects[f"persistentvolumeclaim/data-seqgate-{store}-0"] = claim
            (self.backup / f"{store}.backup").write_bytes(NEW)
            (self.data(store) / f"{store}.db").write_bytes(OLD)
            (self.data(store) / f"{store}.db-wal").write_bytes(OLD)
        self.write({"objects": objects, "calls": [], "data": str(folder / "data")})

    def data(self, store: str) -> Path:
        return self.folder / "data" / store

    def write(self, cluster: dict[str, Any]) -> None:
        self.file.write_text(json.dumps(cluster))

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.file.read_text())
        return found

    @property
    def own_pods(self) -> list[str]:
        return [each for each in self.state["objects"] if each.endswith("-restore")]

    def run(
        self, script: str, *arguments: str, fail_at: int = 0, fails: str = "before"
    ) -> subprocess.CompletedProcess[str]:
        self.write(self.state | {"calls": []})
        return subprocess.run(
            ["sh", str(K8S / script), *arguments],
            env={
                "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
                "CLUSTER": str(self.file),
                "FAIL_AT": str(fail_at),
                "FAILS": fails,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def assert_restored(self) -> None:
        state = self.state
        for name, count in REPLICAS.items():
            assert state["objects"][name]["replicas"] == count, name
            assert NOTE not in state["objects"][name].get("annotations", {})
        assert state["flushed"]
        assert not self.own_pods
        for store in STORES:
            files = {each.name: each.read_bytes() for each in self.data(store).iterdir()}
            assert files == {f"{store}.db": NEW}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "cluster")


def test_a_backup_is_restored(cluster: Cluster) -> None:
    done = cluster.run("restore.sh", "--yes", str(cluster.backup))
    assert done.returncode == 0, done.stderr
    cluster.assert_restored()
    # Again, over what was restored: the same.
    assert cluster.run("restore.sh", "--yes", str(cluster.backup)).returncode == 0
    cluster.assert_restored()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fails", some_of(["before", "after"], every=2))
def test_a_restore_that_fails_at_any_call_ends_well_the_second_time(
    tmp_path: Path, fails: str
) -> None:
    whole = Cluster(tmp_path / "whole")
    assert whole.run("restore.sh", "--yes", str(whole.backup)).returncode == 0
    calls = whole.state["calls"]
    assert len(calls) > 40
    for number in some_of(list(range(1, len(calls) + 1)), every=64):
        cluster = Cluster(tmp_path / str(number))
        first = cluster.run("restore.sh", "--yes", str(cluster.backup), fail_at=number, fails=fails)
        # The last deletion of pods is tried again at the end.
        is_removal = calls[number - 1][2:4] == ["delete", "pod"]
        assert first.returncode != 0 or is_removal, calls[number - 1]
        assert is_removal or not cluster.own_pods, calls[number - 1]
        stores = [(cluster.data(each) / f"{each}.db").read_bytes() for each in STORES]
        assert all(each in (OLD, NEW) for each in stores)
        second = cluster.run("restore.sh", "--yes", str(cluster.backup))
        assert second.returncode == 0, (calls[number - 1], second.stderr)
        cluster.assert_restored()


def test_what_cannot_be_restored_is_refused_before_anything_stops(cluster: Cluster) -> None:
    (cluster.backup / "ledger.backup").write_bytes(b"something else")
    assert "no SQLite database" in refused(cluster)
    (cluster.backup / "ledger.backup").unlink()
    assert "missing" in refused(cluster)
    (cluster.backup / "ledger.backup").write_bytes(NEW)
    state = cluster.state
    valkeys = [each for each in state["objects"] if "valkey" in each]
    for each in valkeys:
        del state["objects"][each]
    cluster.write(state)
    assert "--flush" in refused(cluster)
    del state["objects"]["persistentvolumeclaim/data-seqgate-cursor-0"]
    cluster.write(state)
    assert "no volume" in refused(cluster)


def refused(cluster: Cluster) -> str:
    done = cluster.run("restore.sh", "--yes", str(cluster.backup))
    assert done.returncode == 1
    for name, count in REPLICAS.items():
        assert cluster.state["objects"][name]["replicas"] == count
    return done.stderr


def test_nothing_happens_without_consent(cluster: Cluster) -> None:
    for script, arguments in (
        ("restore.sh", [str(cluster.backup)]),
        ("enlarge.sh", ["seqgate-ledger", "2Gi"]),
        ("upgrade.sh", ["overlay"]),
    ):
        before = cluster.state["objects"]
        assert cluster.run(script, *arguments).returncode == 1
        assert cluster.state["objects"] == before
        assert "applied" not in cluster.state


def test_the_pods_of_a_restore_are_restricted_and_mount_the_volumes_of_the_stores() -> None:
    text = (K8S / "restore-pod.yaml").read_text()
    for store in STORES:
        pod = yaml.safe_load(text.replace("STORE", store).replace("IMAGE", IMAGE))
        kubernetes_validate.validate(pod, "1.37", strict=True)
        spec = pod["spec"]
        assert_restricted(spec)
        assert pod["metadata"]["name"] == f"seqgate-{store}-restore"
        # Pulled as the store's own, with its secrets.
        assert spec["serviceAccountName"] == f"seqgate-{store}"
        assert spec["containers"][0]["image"] == IMAGE
        (volume,) = spec["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == f"data-seqgate-{store}-0"


def test_an_upgrade_is_tried_shown_applied_and_awaited(cluster: Cluster) -> None:
    done = cluster.run("upgrade.sh", "--yes", "overlay")
    assert done.returncode == 0, done.stderr
    assert "+ image: registry.example/seqgate:1" in done.stdout
    verbs = [next(word for word in call if not word.startswith("-")) for call in calls_of(cluster)]
    assert verbs.index("apply") < verbs.index("diff") < len(verbs) - verbs[::-1].index("apply")
    rolled = {call[2] for call in calls_of(cluster) if call[0] == "rollout"}
    assert rolled == set(REPLICAS)
    again = cluster.run("upgrade.sh", "--yes", "overlay")
    assert again.returncode == 0
    assert "nothing changes" in again.stdout


def calls_of(cluster: Cluster) -> list[list[str]]:
    calls = cluster.state["calls"]
    return [call[2:] if call[0] == "--namespace" else call for call in calls]


@pytest.mark.parametrize("script", some_of(["upgrade.sh", "enlarge.sh"], every=2))
def test_a_script_that_fails_at_any_call_ends_well_the_second_time(
    tmp_path: Path, script: str
) -> None:
    arguments = {"upgrade.sh": ["overlay"], "enlarge.sh": ["seqgate-ledger", "2Gi"]}[script]
    whole = Cluster(tmp_path / "whole")
    assert whole.run(script, "--yes", *arguments).returncode == 0
    for number in some_of(list(range(1, len(whole.state["calls"]) + 1)), every=6):
        cluster = Cluster(tmp_path / str(number))
        first = cluster.run(script, "--yes", *arguments, fail_at=number)
        assert first.returncode != 0, whole.state["calls"][number - 1]
        assert cluster.run(script, "--yes", *arguments).returncode == 0
        assert cluster.state["objects"] == whole.state["objects"]
        assert cluster.state.get("applied") == whole.state.get("applied")


def test_an_upgrade_is_refused_by_the_api_server_and_during_a_restore(cluster: Cluster) -> None:
    state = cluster.state
    cluster.write(state | {"refuses": 1})
    done = cluster.run("upgrade.sh", "--yes", "overlay")
    assert done.returncode == 1
    assert "enlarge.sh" in done.stderr
    cluster.write(state)
    restoring = cluster.run("restore.sh", "--yes", str(cluster.backup), fail_at=30)
    assert restoring.returncode != 0
    done = cluster.run("upgrade.sh", "--yes", "overlay")
    assert done.returncode == 1
    assert "restore.sh again" in done.stderr


def test_volumes_are_enlarged_if_their_class_allows_it(cluster: Cluster) -> None:
    assert cluster.run("enlarge.sh", "--yes", "seqgate-ledger", "2Gi").returncode == 0
    objects = cluster.state["objects"]
    assert objects["persistentvolumeclaim/data-seqgate-ledger-0"]["storage"] == "2Gi"
    assert objects["persistentvolumeclaim/data-seqgate-cursor-0"]["storage"] == "1Gi"
    assert "statefulset/seqgate-ledger" not in objects
    deleted = [call for call in calls_of(cluster) if call[0] == "delete"]
    assert deleted == [
        ["delete", "statefulset/seqgate-ledger", "--cascade=orphan", "--ignore-not-found"]
    ]
    objects["storageclass/fast"] = {}
    cluster.write(cluster.state | {"objects": objects})
    done = cluster.run("enlarge.sh", "--yes", "seqgate-cursor", "2Gi")
    assert done.returncode == 1
    assert "does not allow" in done.stderr
