"""Real processes under load, of which something fails all the time, and a checker that believes
nobody.

    application.py   producers, consumers and readers: processes that write journals
    installation.py  the services, two of each on one store, with a link between every pair
    faults.py        what goes wrong and when, drawn from the seed; happening.py does it
    settling.py      faults stop: is everything stored, delivered and acknowledged within a bound?
    evidence.py      what clients saw, and the log
    log_checker.py, delivery_checker.py   what is wrong with it
    page.py          what happened, as a page with a time line
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it tells of each connection that breaks
