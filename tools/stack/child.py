"""Children that do not outlive us.

The kernel sends them SIGTERM when the process that started them dies, however it dies. `setpriv`
(util-linux) asks for that and becomes the command; where it does not exist, children are only
stopped in good order. Asking between fork and exec, in Python, would run gRPC's fork handlers in a
child that has none of its threads.
"""

import shutil
from collections.abc import Sequence


def bound_to_us(command: Sequence[str]) -> list[str]:
    """The command that runs `command` for as long as this process lives."""
    setpriv = shutil.which("setpriv")
    return [*([setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []), *command]
