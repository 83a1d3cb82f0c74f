"""Build the site in build/site.

python -m tools.site    exit 1 if a page is missing from the navigation or the other way round, a
                        link or an anchor leads nowhere, or a page loads something from another host
"""

import sys
from collections.abc import Iterable

from tools.dev.command import carry_out
from tools.site.checks import faults
from tools.site.tree import ROOT, build


def site() -> Iterable[str]:
    found = build(ROOT / "build" / "docs", ROOT / "build" / "site")
    return found or faults(ROOT / "build" / "site")


if __name__ == "__main__":
    sys.exit(carry_out(__doc__, {"": site}))
