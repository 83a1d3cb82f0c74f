"""The files of settings in deploy/k8s have every setting of their services, and no other."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from seqgate.services.runtime.config import ProcessConfig
from tests.deploy.manifests import K8S, SERVICES, read

SETTINGS = K8S / "base" / "settings"

CONSOLE = K8S / "components" / "console"

CONFIGURED = (*SERVICES, "console")

LINE = re.compile(r"(?P<shown># )?(?P<name>SEQGATE_[A-Z_]+)=(?P<value>.*)")


def config_type(service: str) -> type[ProcessConfig]:
    found: type[ProcessConfig] = getattr(
        import_module(f"seqgate.services.{service}.config"), f"{service.capitalize()}Config"
    )
    assert issubclass(found, ProcessConfig)
    return found


def names_of(service: str) -> dict[str, str]:
    """The variables of a service, with the names of their settings."""
    prefix = f"SEQGATE_{service.upper()}_"
    return {prefix + name.upper(): name for name in config_type(service).model_fields}


def lines_of(service: str) -> list[re.Match[str]]:
    folder = CONSOLE if service == "console" else SETTINGS
    text = (folder / f"{service}.env").read_text()
    found = [LINE.fullmatch(line) for line in text.splitlines()]
    return [line for line in found if line is not None]


def in_workload(service: str) -> set[str]:
    """Variables that the workload sets itself."""
    folder = CONSOLE if service == "console" else K8S / "base"
    documents = read((folder / f"{service}.yaml").read_text())
    (workload,) = (each for each in documents if each["kind"] in ("Deployment", "StatefulSet"))
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return {each["name"] for each in container.get("env", ())} & names_of(service).keys()


@pytest.mark.parametrize("service", CONFIGURED)
def test_every_setting_is_in_its_file_or_its_workload_and_no_other(
    service: str,
) -> None:
    named = [line["name"] for line in lines_of(service)]
    assert len(named) == len(set(named))
    assert {*named, *in_workload(service)} == names_of(service).keys()


@pytest.mark.parametrize("service", CONFIGURED)
def test_unset_settings_are_shown_with_their_defaults(service: str) -> None:
    fields = config_type(service).model_fields
    for line in lines_of(service):
        if line["shown"]:
            default = fields[names_of(service)[line["name"]]].default
            assert line["value"] == shown(default), line["name"]


@pytest.mark.parametrize("service", CONFIGURED)
def test_values_in_a_file_are_valid_for_their_service(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in lines_of(service):
        if not line["shown"]:
            monkeypatch.setenv(line["name"], line["value"])
    others = {"advertise": "somewhere:7704"} if service == "dispatcher" else {}
    config: Any = config_type(service)
    assert config(**others).listen.startswith("0.0.0.0:")


def test_every_settings_file_belongs_to_a_service_or_is_used(root: Path) -> None:
    kustomization = (root / "deploy" / "k8s" / "base" / "kustomization.yaml").read_text()
    for file in SETTINGS.iterdir():
        assert f"settings/{file.name}" in kustomization


def shown(default: object) -> str:
    """A default as the value of a variable."""
    match default:
        case None:
            return ""
        case bool():
            return str(default).lower()
        case tuple():
            return "[" + ", ".join(f'"{each}"' for each in default) + "]"
        case float() if default.is_integer():
            return str(int(default))
    return str(default)
