"""What the images are made of, as far as files say it; test_image.py builds them."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tools.dev.locks import IMAGES, parse


@pytest.fixture(scope="module")
def dockerfile(root: Path) -> str:
    text = (root / "deploy" / "docker" / "Dockerfile").read_text()
    return text.replace("\\\n", " ")


@pytest.fixture(scope="module")
def sbom(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("sbom", root / "deploy" / "docker" / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stages(dockerfile: str) -> dict[str, tuple[str, str]]:
    """The base and the text of each stage, by name."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", dockerfile, flags=re.MULTILINE)[1:]
    named = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return {name: (base, text) for base, name, text in named}


def test_the_base_is_pinned_and_updated(dockerfile: str) -> None:
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", dockerfile, re.MULTILINE)
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+\.\d+-slim-\w+", base)
    assert "apt-get upgrade --yes" in stages(dockerfile)["runtime"][1]


def test_only_packages_whose_hashes_are_locked_are_installed(dockerfile: str) -> None:
    installs = re.findall(r"pip install ([^&\n]*)", dockerfile)
    assert len(installs) == 4
    for each in installs:
        assert "--require-hashes" in each or "--no-deps" in each


def test_images_have_no_tools_and_one_layer_of_debian(root: Path, dockerfile: str) -> None:
    given = set(re.findall(r"^!(\S+)$", (root / ".dockerignore").read_text(), re.MULTILINE))
    assert not given & {"tools", "tests", "docs", "examples"}
    for name in ("services", "jobs"):
        base, text = stages(dockerfile)[name]
        assert base == "scratch"
        assert text.count("COPY --from=" + name + "-root / /") == 1
        assert "RUN" not in text
        assert "USER 10001:10001" in text
        assert "strip.sh" in stages(dockerfile)[f"{name}-root"][1]
        for label in ("title", "version", "revision", "licenses"):
            assert f"org.opencontainers.image.{label}=" in text
        assert f"sbom.py {name}.lock" in stages(dockerfile)[f"packages-{name}"][1]


@pytest.mark.parametrize("lock", IMAGES, ids=lambda each: each.stem)
def test_a_bill_of_materials_lists_what_is_installed_of_a_lock(
    root: Path, sbom: ModuleType, lock: Path
) -> None:
    command = [sys.executable, "-I", str(root / "deploy" / "docker" / "sbom.py"), str(lock), "1.2"]
    said = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    assert said[0] == said[1]
    read = json.loads(said[0])
    assert (read["bomFormat"], read["specVersion"]) == ("CycloneDX", "1.6")
    assert read["metadata"]["component"]["version"] == "1.2"
    listed = {each["name"]: each for each in read["components"]}
    locked = {
        each.requirement.partition("==")[0]: each for each in parse(lock.read_text()).packages
    }
    installed = {name for name, each in locked.items() if sbom.is_installed(name, each.version)}
    assert listed.keys() == installed
    assert {"grpcio", "protobuf"} <= installed
    for name, each in listed.items():
        assert each["version"] == locked[name].version
        (files,) = each["externalReferences"]
        assert [one["content"] for one in files["hashes"]] == list(locked[name].hashes)
    assert read["dependencies"][0]["dependsOn"] == [each["bom-ref"] for each in read["components"]]
