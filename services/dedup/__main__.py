"""python -m services.dedup"""

import sys

from services.dedup.app import run
from services.dedup.config import DedupConfig
from services.runtime.process import run_service

if __name__ == "__main__":
    sys.exit(run_service(DedupConfig, run))
