"""Torture Seqgate: applications publish and consume under faults, and nothing may be lost,
duplicated or out of order.

python -m tools.torture --minutes 10 --seed 3 [--store postgres] [--topics 500]
    starts two of each service, on SQLite or three PostgreSQL servers, and injects faults
python -m tools.torture --minutes 10 --ledger HOST:PORT --dispatcher HOST:PORT [--cursor HOST:PORT]
    puts load on a running installation, in which you inject faults, and checks it

Exit status: 0 if every promise held, 1 if one was broken, 2 after SIGTERM. The output folder has
index.html, report.json, and journals/ with each application's observations.
"""

import argparse
import asyncio
import re
import secrets
import shutil
import sys
from pathlib import Path
from typing import Final

from tools.stack.child import cancel_on_sigterm
from tools.torture.cast import NAMESPACE, TOPICS_MAX
from tools.torture.limits import LIMITS, RATE, TINY_RATE
from tools.torture.report import write_report
from tools.torture.shown import Shown
from tools.torture.torturing import RECORD, Options, Tortured, torture

MINUTES_MAX: Final = 24 * 60
RATE_MAX: Final = 1_000

SEED: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")

SHOWN_MAX: Final = 20
SHOWN_CHARACTERS: Final = 600


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.torture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes", type=float, default=2.0, help="duration of the faults (default: 2)"
    )
    parser.add_argument("--seed", help="seed of the faults (default: random)")
    parser.add_argument(
        "--limits", choices=LIMITS, default="default", help="limits of the services"
    )
    parser.add_argument(
        "--rate",
        type=float,
        help=f"messages a second of each producer (default: {RATE:.0f}; with --limits tiny or "
        f"mixed: {TINY_RATE:.0f})",
    )
    parser.add_argument(
        "--store",
        choices=("sqlite", "postgres"),
        default="sqlite",
        help="of logs and cursors (default: sqlite); not with --ledger",
    )
    parser.add_argument(
        "--topics",
        type=int,
        default=0,
        help="further topics, each with a producer, a consumer and a reader (default: 0)",
    )
    parser.add_argument("--out", type=Path, default=Path("build/torture"), help="the output folder")
    parser.add_argument(
        "--ledger", default="", help="HOST:PORT of a running ledger (default: start all services)"
    )
    parser.add_argument(
        "--dispatcher", default="", help="HOST:PORT of its dispatcher; required with --ledger"
    )
    parser.add_argument("--cursor", default="", help="HOST:PORT of its cursor service (optional)")
    parser.add_argument(
        "--namespace",
        default="",
        help=f"tenant/namespace of the topics, which must be new (default: {NAMESPACE}, or with "
        "--ledger torture/SEED)",
    )
    for name, what in (
        ("ca", "CA certificates of the services, in PEM; turns on TLS"),
        ("certificate", "client certificate of the applications, in PEM"),
        ("key", "private key of the client certificate, in PEM"),
        ("token", "file with the applications' bearer token"),
    ):
        parser.add_argument(f"--{name}", default="", help=what)
    return parser


def parsed(arguments: list[str]) -> Options:
    """Parse the options; exits with 2 if they are invalid."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if not 0 < given.minutes <= MINUTES_MAX:
        parser.error(f"--minutes must be above 0 and at most {MINUTES_MAX}")
    usual = RATE if given.limits == "default" else TINY_RATE
    rate = usual if given.rate is None else given.rate
    if not 0 < rate <= RATE_MAX:
        parser.error(f"--rate must be above 0 and at most {RATE_MAX}")
    if not 0 <= given.topics <= TOPICS_MAX:
        parser.error(f"--topics must be 0 to {TOPICS_MAX}")
    if bool(given.ledger) != bool(given.dispatcher) or (given.cursor and not given.ledger):
        parser.error("--ledger and --dispatcher require each other, and --cursor requires both")
    if given.ledger and given.store != "sqlite":
        parser.error("--store applies to services started here, not to --ledger")
    if bool(given.certificate) != bool(given.key) or (given.certificate and not given.ca):
        parser.error("--certificate and --key require each other, and --ca")
    seed = given.seed or secrets.token_hex(4)
    if not SEED.fullmatch(seed):
        parser.error("--seed must be 1 to 40 letters, digits, - and _")
    if (given.out / seed).exists() and not (given.out / seed / RECORD).exists():
        parser.error(f"{given.out / seed} exists and is not a torture's output: choose --out")
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
        on_postgres=given.store == "postgres",
        topics=given.topics,
        namespace=given.namespace or (f"torture/{seed}" if given.ledger else NAMESPACE),
    )


async def run(options: Options) -> Tortured:
    """Run the torture. SIGTERM ends it with all its processes."""
    cancel_on_sigterm()
    return await torture(options)


def main() -> int:
    options = parsed(sys.argv[1:])
    print(f"seed {options.seed}, in {options.folder}", flush=True)
    shutil.rmtree(options.folder, ignore_errors=True)
    try:
        tortured = asyncio.run(run(options))
    except asyncio.CancelledError:
        print("stopped by SIGTERM", file=sys.stderr)
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
        print("every promise held")
        return 0
    print(f"{len(tortured.violations)} violations", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
