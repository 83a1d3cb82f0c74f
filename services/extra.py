"""The extra that services need, and a client's install does not have."""

import sys
from typing import NoReturn

EXIT_USAGE = 2


def require_services(error: ModuleNotFoundError) -> NoReturn:
    """End the process with 2 and the command that installs what is missing.

    Raises:
        ModuleNotFoundError: a module of Seqgate itself is missing, which no extra mends.
    """
    if (error.name or "").split(".")[0] == "seqgate":
        raise error
    sys.stderr.write(
        f"a service needs the packages of an extra ({error.name} is missing): "
        "pip install 'seqgate[services]'\n"
    )
    sys.exit(EXIT_USAGE)
