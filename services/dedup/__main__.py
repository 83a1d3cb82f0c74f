"""python -m seqgate.services.dedup"""

import sys

from seqgate.services.dedup.app import run
from seqgate.services.dedup.config import DedupConfig
from seqgate.services.runtime.process import run_service

if __name__ == "__main__":
    sys.exit(run_service(DedupConfig, run, sys.argv[1:]))
