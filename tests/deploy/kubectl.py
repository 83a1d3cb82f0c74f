"""What the operations' scripts call instead of kubectl: a cluster in a file, with folders as
volumes. It fails at the call FAIL_AT, before or after it has done what it was asked for."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

FILE = Path(os.environ["CLUSTER"])
SELECTED = re.compile(r"app.kubernetes.io/component=(\w+)")


def show(*lines: object) -> None:
    sys.stdout.write(" ".join(map(str, lines)) + "\n")


def main(words: list[str]) -> int:
    """Returns the exit status."""
    cluster = json.loads(FILE.read_text())
    cluster["calls"].append(words)
    FILE.write_text(json.dumps(cluster))
    fails = len(cluster["calls"]) == int(os.environ.get("FAIL_AT", "0"))
    if fails and os.environ["FAILS"] == "before":
        return 2 if words[0] == "diff" else 1  # 1: there are differences
    if words[0] == "--namespace":
        del words[:2]
    status = COMMANDS[words[0]](cluster, words[1:])
    FILE.write_text(json.dumps(cluster))
    return 1 if fails else status


def get(cluster: Any, words: list[str]) -> int:
    objects, output = cluster["objects"], words[words.index("--output") + 1]
    if "--selector" in words:
        found = SELECTED.search(words[words.index("--selector") + 1])
        component = found[1] if found else ""
        kinds = {"pods": ("pod",), "deployments,statefulsets": ("deployment", "statefulset")}
        for name in objects:
            kind, _, rest = name.partition("/")
            if kind in kinds[words[0]] and f"seqgate-{component}" in rest:
                show(name)
        return 0
    if words[0] == "persistentvolumeclaims":
        show("\n".join(each for each in objects if each.startswith("persistentvolumeclaim/")))
        return 0
    if words[0] == "deployments,statefulsets":
        notes = (each.get("annotations", {}) for each in objects.values())
        show(*[note for each in notes for note in each.values()])
        return 0
    name = f"{words[0]}/{words[1]}" if "/" not in words[0] else words[0]
    if name not in objects:
        return 1
    found_object = objects[name]
    if "annotations" in output:
        show(found_object.get("annotations", {}).get("seqgate/replicas-before-restore", ""))
    elif output.startswith("jsonpath="):
        field = re.findall(r"\w+", output)[-1]
        show("yes" if field == "kind" else found_object.get(field, found_object.get("image", "")))
    else:
        show(name)
    return 0


def annotate(cluster: Any, words: list[str]) -> int:
    key, is_set, value = words[1].partition("=")
    notes = cluster["objects"][words[0]].setdefault("annotations", {})
    if is_set:
        notes[key] = value
    else:
        notes.pop(key.removesuffix("-"), None)
    return 0


def scale(cluster: Any, words: list[str]) -> int:
    cluster["objects"][words[0]]["replicas"] = int(words[1].partition("=")[2])
    return 0


def delete(cluster: Any, words: list[str]) -> int:
    names = [f"pod/{each}" for each in words[1:]] if words[0] == "pod" else words[:1]
    for name in names:
        cluster["objects"].pop(name, None)
    return 0


def apply(cluster: Any, words: list[str]) -> int:
    if "--dry-run=server" in words:
        return int(cluster.get("refuses", 0))
    if words[-1] == "-":
        (name,) = re.findall(r"^  name: (.+)$", sys.stdin.read(), re.MULTILINE)
        cluster["objects"][f"pod/{name}"] = {}
    else:
        cluster["applied"] = Path(words[-1]).read_text()
    return 0


def execute(cluster: Any, words: list[str]) -> int:
    at = words.index("--")
    pod = next(each for each in words[:at] if "seqgate-" in each).removeprefix("pod/")
    command = words[at + 1 :]
    if command[0] == "valkey-cli":
        cluster["flushed"] = True
        show(
            "OK" if pod.endswith("-0") else "READONLY You can't write against a read only replica."
        )
        return 0
    store = pod.split("-")[1]
    if pod.endswith("-restore") and f"pod/{pod}" not in cluster["objects"]:
        return 1
    data = f"{cluster['data']}/{store}"
    here = [sys.executable if each == "python" else each for each in command]
    here = [each.replace("/data", data) for each in here]
    done = subprocess.run(here, check=False, stdout=subprocess.PIPE)
    sys.stdout.buffer.write(done.stdout.replace(data.encode(), b"/data"))
    return done.returncode


def patch(cluster: Any, words: list[str]) -> int:
    if "--dry-run=server" not in words:
        size = json.loads(words[-1])["spec"]["resources"]["requests"]["storage"]
        cluster["objects"][words[0]]["storage"] = size
    return 0


def said(text: str) -> Any:
    def say(cluster: Any, words: list[str]) -> int:
        show(text)
        return 0

    return say


def diff(cluster: Any, words: list[str]) -> int:
    if cluster.get("applied") == Path(words[-1]).read_text():
        return 0
    show("diff -u -N /a/apps.v1.Deployment.seqgate-dedup /b/apps.v1.Deployment.seqgate-dedup")
    show("-        image: registry.example/seqgate:0\n+        image: registry.example/seqgate:1")
    return 1


COMMANDS: Any = {
    "annotate": annotate,
    "apply": apply,
    "config": said("a-cluster"),
    "delete": delete,
    "diff": diff,
    "exec": execute,
    "get": get,
    "kustomize": said("  namespace: seqgate"),
    "patch": patch,
    "rollout": said("rolled out"),
    "scale": scale,
    "wait": said("met"),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
