"""python -m seqgate.services.dedup"""

import sys

from seqgate.services.extra import require_services

try:
    from seqgate.services.dedup.app import check, run
    from seqgate.services.dedup.config import DedupConfig
    from seqgate.services.runtime.process import run_service
except ModuleNotFoundError as error:
    require_services(error)

if __name__ == "__main__":
    sys.exit(run_service(DedupConfig, run, sys.argv[1:], check=check))
