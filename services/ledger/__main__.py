"""python -m seqgate.services.ledger"""

import sys

from seqgate.services.extra import require_services

try:
    from seqgate.services.ledger.app import migrate, run
    from seqgate.services.ledger.config import LedgerConfig
    from seqgate.services.runtime.process import run_service
except ModuleNotFoundError as error:
    require_services(error)

if __name__ == "__main__":
    sys.exit(run_service(LedgerConfig, run, sys.argv[1:], migrate=migrate))
