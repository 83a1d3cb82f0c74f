"""python -m seqgate.services.cursor"""

import sys

from seqgate.services.extra import require_services

try:
    from seqgate.services.cursor.app import migrate, run
    from seqgate.services.cursor.config import CursorConfig
    from seqgate.services.runtime.process import run_service
except ModuleNotFoundError as error:
    require_services(error)

if __name__ == "__main__":
    sys.exit(run_service(CursorConfig, run, sys.argv[1:], migrate=migrate))
