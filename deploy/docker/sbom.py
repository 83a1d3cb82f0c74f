"""A bill of materials of the Python packages of an image, CycloneDX 1.6: sbom.py LOCK VERSION

Prints the packages of a lock that this Python has installed, each with the hashes of the files that
the lock admits, and the project itself. The same lock makes the same text. Debian's packages are in
the image's own list, /var/lib/dpkg/status.

Nothing but the standard library: it runs while the image is built.
"""

import hashlib
import json
import re
import sys
import uuid
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

PACKAGE: Final = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)
HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def packages_in(lock: str) -> Iterator[tuple[str, str, list[str]]]:
    """The name, the version and the hashes of each package."""
    found = list(PACKAGE.finditer(lock))
    ends = [each.start() for each in found[1:]] + [len(lock)]
    for each, end in zip(found, ends, strict=True):
        yield each[1], each[2], HASH.findall(lock, each.end(), end)


def is_installed(name: str, wanted: str) -> bool:
    try:
        return version(name) == wanted
    except PackageNotFoundError:
        return False


def bill(lock: str, project: str) -> dict[str, Any]:
    """The document. `project` is the version of Seqgate."""
    components = [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name.lower()}@{release}",
            "name": name,
            "version": release,
            "purl": f"pkg:pypi/{name.lower()}@{release}",
            "externalReferences": [
                {
                    "type": "distribution",
                    "url": f"pkg:pypi/{name.lower()}@{release}",
                    "hashes": [{"alg": "SHA-256", "content": each} for each in hashes],
                }
            ],
        }
        for name, release, hashes in packages_in(lock)
        if is_installed(name, release)
    ]
    subject = f"pkg:pypi/seqgate@{project}"
    digest = hashlib.sha256(json.dumps([project, components]).encode()).hexdigest()
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": subject,
                "name": "seqgate",
                "version": project,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": components,
        "dependencies": [{"ref": subject, "dependsOn": [each["bom-ref"] for each in components]}],
    }


if __name__ == "__main__":
    made = bill(Path(sys.argv[1]).read_text(), sys.argv[2])
    sys.stdout.write(json.dumps(made, indent=1) + "\n")
