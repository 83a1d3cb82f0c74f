"""A process that writes the time on request.

For each line of its input it writes time.time(), time.time_ns() and time.monotonic().
"""

import sys
import time


def main() -> None:
    for _ in sys.stdin:
        sys.stdout.write(f"{time.time()} {time.time_ns()} {time.monotonic()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
