"""The demo's Spark jobs, in one session.

python -m tools.demo.jobs LEDGER DEDUP CURSOR

Rebuilds what was lost, compares everything with the whole log, and audits the log. Each job prints
what it prints by itself, and then a line that says how it ended.
"""

import json
import sys
import time
from collections.abc import Callable

from seqgate.spark import local_session
from tools.audit.__main__ import main as audit
from tools.demo.rebuilding import ENDED
from tools.rebuild.__main__ import main as rebuild


def main() -> None:
    """Run the command."""
    ledger, dedup, cursor = sys.argv[1:]
    log = ["--json", "--ledger", ledger]
    everything = [*log, "--dedup", dedup, "--cursor", cursor]
    spark = local_session("seqgate demo")
    jobs: dict[str, Callable[[], int]] = {
        "rebuild": lambda: rebuild(everything, spark),
        "compare": lambda: rebuild([*everything, "--dry-run", "--diff", "*"], spark),
        "audit": lambda: audit(log, spark),
    }
    for name, run in jobs.items():
        started = time.monotonic()
        status = run()
        seconds = round(time.monotonic() - started, 1)
        print(json.dumps({"kind": ENDED, "job": name, "status": status, "seconds": seconds}))


if __name__ == "__main__":
    main()
