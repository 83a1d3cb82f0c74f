"""python -m services.dispatcher"""

import sys

from services.dispatcher.app import run
from services.dispatcher.config import DispatcherConfig
from services.runtime.process import run_service

if __name__ == "__main__":
    sys.exit(run_service(DispatcherConfig, run))
