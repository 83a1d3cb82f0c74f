"""Run tests with a deliberate defect:

    python -m tests.simulation.defects A10 tests/unit/test_snapshots.py

The exit status is pytest's: 1 if the defect is found.
"""

import sys
from contextlib import ExitStack

import pytest

from tests.simulation.defects import find
from tests.simulation.system.mistakes import Patch


def main(id_: str, *arguments: str) -> int:
    """Run pytest with a defect, and return its exit status."""
    with ExitStack() as stack:
        find(id_).apply(Patch(stack))
        return int(pytest.main(["-q", "-x", "--no-header", *arguments]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
