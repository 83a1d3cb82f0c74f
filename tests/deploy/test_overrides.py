"""What an overlay sets counts, by the oldest kustomize and the newest: they differ in whether the
overlay's generators run before its components or after them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import KUBECTLS
from tests.deploy.manifests import (
    K8S,
    OVERLAYS,
    SERVICES,
    Document,
    Manifests,
    components,
    read,
    render,
    render_all,
)
from tests.deploy.test_manifests import (
    CONSOLE,
    OUTSIDE,
    REDIS,
    STORES,
    combinations,
    kustomization,
)
from tests.support.depth import some_of
from tests.support.page_programs import BLOCK
from tools.site.tree import ROOT, sources

REBUILD = K8S / "rebuild"

EVERYTHING = tuple(
    sorted({*components()} - {"insecure", *REDIS, *STORES[1:], *OUTSIDE[1:], *CONSOLE[1:]})
)
"""Components that go together, each with settings of its own."""


def taught() -> Iterator[tuple[str, Document]]:
    """The patches of overlays that pages show, and the pages."""
    for page in sources():
        for block in BLOCK.finditer(page.read_text()):
            if block["language"] == "yaml":
                for each in yaml.safe_load(block["code"])["patches"]:
                    yield page.relative_to(ROOT).as_posix(), each


def overlay(folder: Path, patches: list[Document], within: Path = K8S) -> Path:
    """A folder with everything, and these patches."""
    chosen = EVERYTHING if within == K8S else tuple(components(within))
    file = kustomization(folder, chosen, within) / "kustomization.yaml"
    document = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(document | {"patches": patches}))
    return folder


def generated(within: Path) -> set[str]:
    """The names of generated ConfigMaps, without hashes."""
    files = map(Path.read_text, within.glob("**/kustomization.yaml"))
    return {each["name"] for file in files for each in read(file)[0].get("configMapGenerator", ())}


def data_of(manifests: Manifests, names: set[str]) -> dict[str, dict[str, str]]:
    """The data of the ConfigMaps that there are of these."""
    found = [each["metadata"]["name"] for each in manifests.of_kind("ConfigMap")]
    there = {
        each for each in names if any(map(re.compile(f"{each}(-\\w{{10}})?").fullmatch, found))
    }
    return {each: manifests.get("ConfigMap", each)["data"] for each in there}


def in_pods(manifests: Manifests) -> set[tuple[str, str]]:
    """The variables and values of all containers."""
    return {
        (name, variable.value)
        for workload in manifests.workloads()
        for container in (*workload.containers, *workload.initial)
        for name, variable in workload.variables(container=container).items()
    }


def test_pages_teach_the_overrides_that_they_name() -> None:
    settings = {name for _, each in taught() for name in yaml.safe_load(each["patch"])["data"]}
    named = {"LEDGER_JWT_ISSUER", "LEDGER_POSTGRES_STANDBY_REQUIRED", "CONSOLE_ORIGIN"}
    assert settings >= {"OTLP_BACKEND", *(f"SEQGATE_{each}" for each in named)}


@pytest.mark.parametrize("kubectl", KUBECTLS)
def test_an_override_reaches_the_pods_as_its_page_shows_it(kubectl: str, tmp_path: Path) -> None:
    patches = [each for _, each in taught()]
    for patch in [each for each in patches if "JWT_ISSUER" in each["patch"]]:
        for service in SERVICES[1:]:  # "in the same way for ..."
            text = patch["patch"].replace("seqgate-ledger", f"seqgate-{service}")
            text = text.replace("_LEDGER_", f"_{service.upper()}_")
            patches.append({"patch": text})
    before = Manifests(read(render(overlay(tmp_path / "before", []), kubectl)))
    after = Manifests(read(render(overlay(tmp_path / "after", patches), kubectl)))
    variables = in_pods(after)
    for each in map(yaml.safe_load, (each["patch"] for each in patches)):
        for name, value in each["data"].items():
            assert (name, value) in variables - in_pods(before)
        changed, was = (of.get("ConfigMap", each["metadata"]["name"]) for of in (after, before))
        assert changed["metadata"]["name"] != was["metadata"]["name"]  # which replaces the pods


@pytest.mark.parametrize("within", [K8S, REBUILD])
@pytest.mark.parametrize("kubectl", KUBECTLS)
def test_every_setting_of_base_and_components_can_be_overridden(
    kubectl: str, within: Path, tmp_path: Path
) -> None:
    names = generated(within)
    plain = Manifests(read(render(overlay(tmp_path / "before", [], within), kubectl)))
    before = data_of(plain, names)
    assert len(before) == len(plain.of_kind("ConfigMap"))
    wanted = {name: {key: f"ours {key}" for key in data} for name, data in before.items()}
    patches: list[Any] = [
        {
            "patch": yaml.safe_dump(
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}
            )
        }
        for name, data in wanted.items()
    ]
    after = Manifests(read(render(overlay(tmp_path / "after", patches, within), kubectl)))
    assert data_of(after, names) == wanted
    values = dict(in_pods(after))
    for name in ("SEQGATE_LEDGER_JWT_ISSUER", "OTLP_BACKEND") if within == K8S else ():
        assert values[name] == f"ours {name}"


def test_generators_of_an_overlay_run_after_components_by_the_oldest_and_before_by_the_newest(
    tmp_path: Path,
) -> None:
    """Why the pages teach patches."""
    folder = kustomization(tmp_path / "merged", ("mtls", "tokens"))
    file, name = folder / "kustomization.yaml", "SEQGATE_LEDGER_JWT_ISSUER"
    merged = {"name": "seqgate-ledger", "behavior": "merge", "literals": [f"{name}=ours"]}
    document = yaml.safe_load(file.read_text()) | {"configMapGenerator": [merged]}
    file.write_text(yaml.safe_dump(document))
    oldest, newest = (Manifests(read(render(folder, kubectl))) for kubectl in KUBECTLS)
    assert (name, "ours") in in_pods(oldest)
    assert (name, "ours") not in in_pods(newest)


def test_the_oldest_kustomize_and_the_newest_render_the_same(tmp_path: Path) -> None:
    folders = [each / "overlays" / name for each in (K8S, REBUILD) for name in OVERLAYS]
    folders += [
        kustomization(tmp_path / str(number), chosen)
        for number, chosen in enumerate(some_of(list(combinations()), every=40))
    ]
    oldest, newest = (render_all(folders, kubectl) for kubectl in KUBECTLS)
    for folder, one, other in zip(folders, oldest, newest, strict=True):
        assert one == other, (folder / "kustomization.yaml").read_text()
