"""python -m seqgate.services.dispatcher"""

import sys

from seqgate.services.extra import require_services

try:
    from seqgate.services.dispatcher.app import run
    from seqgate.services.dispatcher.config import DispatcherConfig
    from seqgate.services.runtime.process import run_service
except ModuleNotFoundError as error:
    require_services(error)

if __name__ == "__main__":
    sys.exit(run_service(DispatcherConfig, run, sys.argv[1:]))
