"""python -m services.filter"""

import sys

from services.filter.app import run
from services.filter.config import FilterConfig
from services.runtime.process import run_service

if __name__ == "__main__":
    sys.exit(run_service(FilterConfig, run))
