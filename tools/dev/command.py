"""The command line of a check: runs the action that its arguments name, and prints its faults."""

import sys
from collections.abc import Callable, Iterable, Mapping

Action = Callable[[], Iterable[str]]


def carry_out(usage: str | None, actions: Mapping[str, Action]) -> int:
    """Run the named action. Returns 0; 1 if it found faults; 2 if there is no such action."""
    action = actions.get(" ".join(sys.argv[1:]))
    if action is None:
        print(usage, file=sys.stderr)
        return 2
    found = list(action())
    for each in found:
        print(each)
    return 1 if found else 0
