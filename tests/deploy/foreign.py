"""Schemas of other projects' kinds: only the fields that the manifests use, so that an unknown or
misspelt field is a fault. Each file in schemas/ names its source and version."""

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.deploy.manifests import Document

SCHEMAS = Path(__file__).parent / "schemas"

_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}

_METADATA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "namespace"],
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": _TEXTS,
        "annotations": _TEXTS,
    },
}


@cache
def validators() -> dict[tuple[str, str], Any]:
    """A validator for each API version and kind."""
    made: dict[tuple[str, str], Any] = {}
    for file in sorted(SCHEMAS.iterdir()):
        read = yaml.safe_load(file.read_text())
        for kind, spec in read["kinds"].items():
            schema = {
                "type": "object",
                "additionalProperties": False,
                "required": ["apiVersion", "kind", "metadata", "spec"],
                "properties": {
                    "apiVersion": {"const": read["apiVersion"]},
                    "kind": {"const": kind},
                    "metadata": _METADATA,
                    "spec": spec,
                },
            }
            jsonschema.Draft202012Validator.check_schema(schema)
            made[read["apiVersion"], kind] = jsonschema.Draft202012Validator(schema)
    return made


def is_foreign(document: Document) -> bool:
    return document["apiVersion"] in {version for version, _ in validators()}


def faults_of(document: Document) -> list[str]:
    """Violations of a foreign kind's schema."""
    validator = validators()[document["apiVersion"], document["kind"]]
    name = f"{document['kind']} {document['metadata']['name']}"
    return [
        f"{name}: {error.json_path}: {error.message}" for error in validator.iter_errors(document)
    ]
