"""Real processes under load and faults, with checkers that trust no service.

application.py   producers, consumers and readers: processes that write journals
installation.py  two of each service on one store, with a link between every pair
faults.py        the faults and their times, drawn from the seed; happening.py injects them
settling.py      after the last fault: is everything stored, delivered and acknowledged in time?
evidence.py      the journals, the log, and the cursors
log_checker.py, delivery_checker.py   the violations in them
page.py          the report as a page with a time line
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # or gRPC reports each broken connection
