"""python -m seqgate.services.filter"""

import sys

from seqgate.services.extra import require_services

try:
    from seqgate.services.filter.app import run
    from seqgate.services.filter.config import FilterConfig
    from seqgate.services.runtime.process import run_service
except ModuleNotFoundError as error:
    require_services(error)

if __name__ == "__main__":
    sys.exit(run_service(FilterConfig, run, sys.argv[1:]))
