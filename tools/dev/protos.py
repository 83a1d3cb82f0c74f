"""The wire contract: generates seqgate/api from protos/, compares, and lints.

python -m tools.dev.protos            write seqgate/api, and google/rpc in protos/
python -m tools.dev.protos --check    exit 1 if one of them is stale
python -m tools.dev.protos --lint     exit 1 if buf finds faults in protos/, or a change that breaks
                                      callers of the last released version
python -m tools.dev.protos --release  keep the contract as that of the version in pyproject.toml
"""

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

import grpc_tools
from google.rpc import status_pb2

from tools.dev.command import carry_out

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
GENERATED = ROOT / "seqgate" / "api"
RELEASES = PROTOS / "releases"
"""The contracts of released versions, as descriptor sets: <version>.binpb."""
CARRIED = ("google/rpc/error_details.proto", "google/rpc/status.proto")
"""Copies of Google's files, so that protos/ can be compiled without other packages."""


def protoc(*outputs: str) -> None:
    """Compile our files in protos/; google/protobuf comes with protoc."""
    sources = sorted(
        str(path.relative_to(PROTOS)) for path in (PROTOS / "seqgate").rglob("*.proto")
    )
    includes = [PROTOS, Path(grpc_tools.__file__).parent / "_proto"]
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
    """Lint protos/, and compare it with the last released contract."""
    released = max(RELEASES.glob("*.binpb"), key=_version)
    return buf("lint") + buf("breaking", "--against", str(released))


def buf(command: str, *options: str) -> list[str]:
    """What buf says against protos/, by the rules of its buf.yaml."""
    program = Path(sysconfig.get_path("scripts")) / "buf"
    given = [str(program), command, *options]
    done = subprocess.run(given, cwd=PROTOS, check=False, capture_output=True, text=True)
    return (done.stdout + done.stderr).splitlines() or ["buf failed"] * (done.returncode != 0)


def _version(image: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in image.stem.split("."))


def release() -> list[str]:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    protoc("--include_imports", f"--descriptor_set_out={RELEASES / f'{version}.binpb'}")
    return []


def check() -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        changed = differences(Path(scratch) / "seqgate" / "api", GENERATED)
    stale = [f"seqgate/api/{path}" for path in changed]
    stale += [
        f"protos/{name}"
        for name in CARRIED
        if (PROTOS / name).read_bytes() != (_packaged() / name).read_bytes()
    ]
    return [f"{path} is stale: run make protos" for path in stale]


def _packaged() -> Path:
    """The folder of the installed package that has Google's files."""
    return Path(status_pb2.__file__).parents[2]


def write() -> list[str]:
    for name in CARRIED:
        shutil.copyfile(_packaged() / name, PROTOS / name)
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        shutil.rmtree(GENERATED, ignore_errors=True)
        shutil.copytree(Path(scratch) / "seqgate" / "api", GENERATED)
    return []


if __name__ == "__main__":
    sys.exit(
        carry_out(__doc__, {"": write, "--check": check, "--lint": lint, "--release": release})
    )
