"""python -m services.ledger"""

import sys

from services.ledger.app import run
from services.ledger.config import LedgerConfig
from services.runtime.process import run_service

if __name__ == "__main__":
    sys.exit(run_service(LedgerConfig, run))
