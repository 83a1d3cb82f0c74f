"""python -m services.cursor"""

import sys

from services.cursor.app import run
from services.cursor.config import CursorConfig
from services.runtime.process import run_service

if __name__ == "__main__":
    sys.exit(run_service(CursorConfig, run))
