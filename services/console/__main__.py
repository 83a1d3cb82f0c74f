"""python -m seqgate.services.console"""

import sys

from seqgate.services.extra import require_services

try:
    from seqgate.services.console.app import run
    from seqgate.services.console.config import ConsoleConfig
    from seqgate.services.runtime.process import run_service
except ModuleNotFoundError as error:
    require_services(error, "console")

if __name__ == "__main__":
    sys.exit(run_service(ConsoleConfig, run, sys.argv[1:]))
