"""Reports files of tests that this machine cannot run, once in each run."""

import sys

import pytest


def report_left_out(config: pytest.Config, file: str, lacking: str) -> None:
    worker = getattr(config, "workerinput", {"workerid": "gw0"})["workerid"]
    if worker == "gw0":
        capture = config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            sys.stderr.write(f"left out: {file}, without {lacking}\n")
            sys.stderr.flush()
