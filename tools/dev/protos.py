"""The wire contract: generate seqgate/api from protos/, compare, and lint.

python -m tools.dev.protos            write seqgate/api
python -m tools.dev.protos --check    exit 1 if seqgate/api is not what would be written
python -m tools.dev.protos --lint     exit 1 if buf finds fault with protos/
"""

import filecmp
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import grpc_tools
from google.rpc import status_pb2

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
    """Paths that are in only one of the trees, or not the same in both."""

    def files(root: Path) -> set[Path]:
        return {
            path.relative_to(root)
            for path in root.rglob("*")
            if path.is_file() and path.suffix in {".py", ".pyi"}
        }

    ours, theirs = files(left), files(right)
    found = [str(path) for path in sorted(ours ^ theirs)]
    found += [
        str(path)
        for path in sorted(ours & theirs)
        if not filecmp.cmp(left / path, right / path, shallow=False)
    ]
    return found


def lint() -> int:
    """Hand buf an image of protos/; it resolves no import itself, so it needs no network."""
    with tempfile.TemporaryDirectory() as scratch:
        image = Path(scratch) / "image.binpb"
        protoc("--include_imports", "--include_source_info", f"--descriptor_set_out={image}")
        buf = Path(sysconfig.get_path("scripts")) / "buf"
        command = [str(buf), "lint", str(image), "--config", str(PROTOS / "buf.yaml")]
        return subprocess.run(command, check=False).returncode


def check() -> int:
    """Compare seqgate/api with what protos/ would generate."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        stale = differences(Path(scratch) / "seqgate" / "api", GENERATED)
    for path in stale:
        print(f"seqgate/api/{path} is not what protos/ would generate: run make protos")
    return 1 if stale else 0


def write() -> int:
    """Replace seqgate/api."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        shutil.rmtree(GENERATED, ignore_errors=True)
        shutil.copytree(Path(scratch) / "seqgate" / "api", GENERATED)
    return 0


def main() -> int:
    match sys.argv[1:]:
        case []:
            return write()
        case ["--check"]:
            return check()
        case ["--lint"]:
            return lint()
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
