"""The extra that services need, and that a client's installation lacks."""

import sys
from typing import NoReturn

from seqgate.extras import pip_install

EXIT_USAGE = 2


def require_services(error: ModuleNotFoundError, extra: str = "services") -> NoReturn:
    """Exit with status 2 and the command that installs the extra.

    Raises:
        ModuleNotFoundError: a module of Seqgate itself is missing, which no extra fixes.
    """
    if (error.name or "").split(".")[0] == "seqgate":
        raise error
    sys.stderr.write(
        f"a service needs the packages of an extra ({error.name} is missing): "
        f"{pip_install(extra)}\n"
    )
    sys.exit(EXIT_USAGE)
