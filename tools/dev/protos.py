"""The wire contract: generates seqgate/api from protos/, compares, and lints.

python -m tools.dev.protos            write seqgate/api
python -m tools.dev.protos --check    exit 1 if seqgate/api is stale
python -m tools.dev.protos --lint     exit 1 if buf finds faults in protos/
"""

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import grpc_tools
from google.rpc import status_pb2

from tools.dev.command import carry_out

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
GENERATED = ROOT / "seqgate" / "api"


def protoc(*outputs: str) -> None:
    """Compile every file of protos/; google/rpc and google/protobuf come from the environment."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    includes = [
        PROTOS,
        Path(grpc_tools.__file__).parent / "_proto",
        Path(status_pb2.__file__).parents[2],
    ]
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc"),
            *(f"-I{path}" for path in includes),
            *(f"--plugin={_plugin(name)}" for name in ("mypy", "mypy_grpc")),
            *outputs,
            *sources,
        ],
        check=True,
    )


def _plugin(name: str) -> str:
    return f"protoc-gen-{name}={Path(sysconfig.get_path('scripts')) / f'protoc-gen-{name}'}"


def generate(out: Path) -> None:
    """Write the generated packages below `out`, one __init__.py in each folder."""
    protoc(
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
    )
    api = out / "seqgate" / "api"
    for folder in [api, *(path for path in api.rglob("*") if path.is_dir())]:
        (folder / "__init__.py").write_text('"""Generated from protos/; do not edit."""\n')


def differences(left: Path, right: Path) -> list[str]:
    """Paths in only one of the trees, or with different contents."""

    def files(root: Path) -> dict[str, bytes]:
        found = (path for path in root.rglob("*") if path.suffix in {".py", ".pyi"})
        return {str(path.relative_to(root)): path.read_bytes() for path in found}

    ours, theirs = files(left), files(right)
    return sorted({path for path, _ in ours.items() ^ theirs.items()})


def lint() -> list[str]:
    """Lint a compiled image of protos/: buf would need a network to resolve imports."""
    with tempfile.TemporaryDirectory() as scratch:
        image = Path(scratch) / "image.binpb"
        protoc("--include_imports", "--include_source_info", f"--descriptor_set_out={image}")
        buf = Path(sysconfig.get_path("scripts")) / "buf"
        command = [str(buf), "lint", str(image), "--config", str(PROTOS / "buf.yaml")]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    return (done.stdout + done.stderr).splitlines() or ["buf failed"] * (done.returncode != 0)


def check() -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        stale = differences(Path(scratch) / "seqgate" / "api", GENERATED)
    return [f"seqgate/api/{path} is stale: run make protos" for path in stale]


def write() -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        shutil.rmtree(GENERATED, ignore_errors=True)
        shutil.copytree(Path(scratch) / "seqgate" / "api", GENERATED)
    return []


if __name__ == "__main__":
    sys.exit(carry_out(__doc__, {"": write, "--check": check, "--lint": lint}))
