"""Torture Seqgate: load from real applications, everything fails, and nothing may be lost, doubled
or out of order.

python -m tools.torture --minutes 10 --seed 3
    starts two of each service in a folder of its own, and breaks them
python -m tools.torture --minutes 10 --ledger HOST:PORT --dispatcher HOST:PORT [--cursor HOST:PORT]
    puts load on an installation that somebody else breaks meanwhile, and judges it

Ends with 0 when what was promised held, 1 when it did not, and 2 when it was told to stop. What
happened is in the output folder: index.html, report.json, and journals/ with what each application
saw.
"""

import argparse
import asyncio
import re
import secrets
import shutil
import signal
import sys
from pathlib import Path
from typing import Final

from tools.torture.cast import NAMESPACE
from tools.torture.limits import LIMITS, RATE, TINY_RATE, rate_of
from tools.torture.report import write_report
from tools.torture.shown import Shown
from tools.torture.torturing import RECORD, Options, Tortured, torture

MINUTES_MAX: Final = 24 * 60
RATE_MAX: Final = 1_000

SEED: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")

SHOWN_MAX: Final = 20
SHOWN_CHARACTERS: Final = 600


def parsed(arguments: list[str]) -> Options:
    """What is asked for; ends the process with 2 where that makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.torture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="how long faults go on; 2")
    parser.add_argument("--seed", help="decides which faults there are; random unless given")
    parser.add_argument("--limits", choices=LIMITS, default="default", help="of the services")
    parser.add_argument(
        "--rate",
        type=float,
        help=f"messages a second a producer; {RATE:.0f}, and {TINY_RATE:.0f} where limits are tiny",
    )
    parser.add_argument("--out", type=Path, default=Path("build/torture"), help="the output folder")
    parser.add_argument("--ledger", default="", help="an installation of somebody else's")
    parser.add_argument("--dispatcher", default="", help="likewise")
    parser.add_argument("--cursor", default="", help="likewise; need not be given")
    parser.add_argument(
        "--namespace",
        default="",
        help=f"tenant/namespace of the topics, which must be new; {NAMESPACE}, or on an "
        "installation of somebody else's one with the seed",
    )
    for name, what in (
        ("ca", "TLS: the authorities of the services' certificates, in PEM"),
        ("certificate", "the certificate that applications show, in PEM"),
        ("key", "its key, in PEM"),
        ("token", "a file with the token that they show"),
    ):
        parser.add_argument(f"--{name}", default="", help=what)
    given = parser.parse_args(arguments)
    if not 0 < given.minutes <= MINUTES_MAX:
        parser.error(f"--minutes is above 0 and at most {MINUTES_MAX}")
    rate = given.rate if given.rate is not None else rate_of(given.limits)
    if not 0 < rate <= RATE_MAX:
        parser.error(f"--rate is above 0 and at most {RATE_MAX}")
    if bool(given.ledger) != bool(given.dispatcher) or (given.cursor and not given.ledger):
        parser.error("--ledger and --dispatcher go together")
    if bool(given.certificate) != bool(given.key) or (given.certificate and not given.ca):
        parser.error("--certificate and --key go together, and with --ca")
    seed = given.seed or secrets.token_hex(4)
    if not SEED.fullmatch(seed):
        parser.error("--seed is 1 to 40 letters, digits, - and _")
    if (given.out / seed).exists() and not (given.out / seed / RECORD).exists():
        parser.error(f"{given.out / seed} exists, and no torture has made it")
    return Options(
        folder=given.out / seed,
        seconds=given.minutes * 60,
        seed=seed,
        limits=given.limits,
        rate=rate,
        ledger=given.ledger,
        dispatcher=given.dispatcher,
        cursor=given.cursor,
        shown=Shown(given.ca, given.certificate, given.key, given.token),
        namespace=given.namespace or (f"torture/{seed}" if given.ledger else NAMESPACE),
    )


async def run(options: Options) -> Tortured:
    """Torture until it is over, or SIGTERM; then everything that was started is ended."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await torture(options)


def main() -> int:
    options = parsed(sys.argv[1:])
    print(f"seed {options.seed}, in {options.folder}", flush=True)
    shutil.rmtree(options.folder, ignore_errors=True)
    try:
        tortured = asyncio.run(run(options))
    except asyncio.CancelledError:
        print("told to stop", file=sys.stderr)
        return 2
    report = write_report(options, tortured)
    operations, faults = report["operations"], report["faults"]
    print(
        f"{operations.get('receipt', 0):,} receipts, {operations.get('given', 0):,} deliveries, "
        f"{operations.get('done', 0):,} acknowledgements, {sum(faults.values()):,} faults of "
        f"{len(faults)} kinds"
    )
    print(f"{options.folder / 'index.html'}")
    for each in tortured.violations[:SHOWN_MAX]:
        print(str(each)[:SHOWN_CHARACTERS], file=sys.stderr)
    if not tortured.violations:
        print("what was promised held")
        return 0
    print(f"{len(tortured.violations)} violations", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
