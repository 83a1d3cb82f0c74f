"""The lock files: pinned packages with the hashes of all files of each version, so that one lock
serves every machine and every Python, and only these files are ever installed.

python -m tools.dev.locks            update the hashes, and write the images' locks
python -m tools.dev.locks --check    exit 1 if a package lacks hashes, or an image's lock is stale;
                                     queries no index

To change a package, edit requirements.lock (`name==version`, as `pip freeze` writes it) and run
this. It queries pip's configured index for the files of each version. The images' locks,
deploy/docker/*.lock, are the part of requirements.lock that pyproject.toml's extras need, according
to the packages installed here.
"""

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final, NamedTuple

from tools.dev.command import carry_out

ROOT: Final = Path(__file__).resolve().parents[2]

LOCKS: Final = (
    ROOT / "requirements.lock",
    ROOT / "requirements-checkov.lock",
    ROOT / "requirements-bench.lock",
    ROOT / "requirements-spark.lock",
    ROOT / "requirements-kubectl.lock",
)
"""Written by hand, except for the hashes."""

IMAGES: Final = {
    ROOT / "deploy" / "docker" / "services.lock": ("services", "cli", "console"),
    ROOT / "deploy" / "docker" / "jobs.lock": ("services", "cli", "console", "spark"),
}
"""Generated: the lock of each image, and the extras that it installs."""

PROJECT: Final = "seqgate"

BUILDS: Final = "setuptools"
"""Builds sdists; part of every lock."""

MACHINES: Final = ("x86_64", "aarch64")
PYTHONS: Final = ("3.11.2", "3.11.9", "3.12.4", "3.13.1", "3.14.0")
"""The Python versions and machines for which the images' needs are resolved."""

IMAGE_HEADER: Final = """\
# What the image installs: a part of requirements.lock, made by `python -m tools.dev.locks`.
"""

HASH: Final = "    --hash=sha256:"


class Pinned(NamedTuple):
    """A package of a lock: name==version, optionally with a marker, and the hashes of its files."""

    requirement: str
    hashes: tuple[str, ...]

    @property
    def name(self) -> str:
        return canonical(self.requirement.partition("==")[0])

    @property
    def version(self) -> str:
        return self.requirement.partition("==")[2].partition(";")[0].strip()

    def lines(self) -> str:
        parts = [self.requirement, *(f"{HASH}{each}" for each in self.hashes)]
        return " \\\n".join(parts) + "\n"


class Lock(NamedTuple):
    header: str
    packages: list[Pinned]

    def text(self) -> str:
        return self.header + "".join(each.lines() for each in self.packages)


def canonical(name: str) -> str:
    """A package's canonical name: foo-bar for Foo_Bar."""
    return name.strip().lower().replace("_", "-").replace(".", "-")


def parse(text: str) -> Lock:
    """Parse a lock, with or without hashes. Raises ValueError for an invalid line."""
    header: list[str] = []
    packages: list[Pinned] = []
    for line in text.replace(" \\\n", "\n").splitlines(keepends=True):
        if line.startswith(HASH):
            last = packages.pop()
            packages.append(last._replace(hashes=(*last.hashes, line.removeprefix(HASH).strip())))
        elif line.startswith("#") and not packages:
            header.append(line)
        elif "==" in line:
            packages.append(Pinned(line.strip(), ()))
        elif line.strip():
            raise ValueError(f"neither a comment nor a pinned package: {line.strip()}")
    return Lock("".join(header), packages)


class Index:
    """pip's configured index, by pip's own classes. Ignores local folders: other machines lack
    them."""

    def __init__(self) -> None:
        from pip._internal.commands import create_command

        logging.getLogger("pip").setLevel(logging.ERROR)  # silences notes on skipped folders
        install: Any = create_command("install")
        options, _ = install.parse_args(["--no-cache-dir"])
        # pip has no public interface to all files of a version.
        session = install._build_session(options)  # noqa: SLF001
        finder = install._build_package_finder(options, session)  # noqa: SLF001
        self._collector: Any = finder._link_collector  # noqa: SLF001

    def hashes(self, package: Pinned) -> tuple[str, ...]:
        """The hashes of all files of a version. Raises LookupError if a file or hash is missing."""
        from pip._vendor.packaging.version import Version

        found: set[str] = set()
        for link in self._links(package.name):
            version = _version(link.filename)
            if version is None or version != Version(package.version):
                continue
            if link.hash_name != "sha256":
                raise LookupError(f"the index gives no sha256 hash of {link.filename}")
            found.add(str(link.hash))
        if not found:
            raise LookupError(f"the index has no file of {package.requirement}")
        return tuple(sorted(found))

    def _links(self, name: str) -> Iterator[Any]:
        from pip._internal.index.collector import parse_links

        sources = self._collector.collect_sources(name, lambda _: [])
        for source in (*sources.index_urls, *sources.find_links):
            if source is None or source.link is None or source.link.is_file:
                continue
            page = self._collector.fetch_response(source.link)
            if page is not None:
                yield from parse_links(page)


def _version(filename: str) -> Any:
    """The version of a wheel or an sdist; None for other files."""
    from pip._vendor.packaging import utils

    try:
        if filename.endswith(".whl"):
            return utils.parse_wheel_filename(filename)[1]
        return utils.parse_sdist_filename(filename)[1]
    except (utils.InvalidWheelFilename, utils.InvalidSdistFilename, ValueError):
        return None


def needed(extras: Sequence[str], lock: Lock) -> list[Pinned]:
    """The part of a lock that extras of this project need on any supported machine and Python,
    according to the packages installed here. Raises LookupError if a needed package is not in the
    lock."""
    pinned = {each.name: each for each in lock.packages}
    wanted = {BUILDS}
    waiting = [(PROJECT, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        asked = waiting.pop()
        if asked in seen:
            continue
        seen.add(asked)
        name, chosen = asked
        for requirement in _requirements(name, chosen):
            other = canonical(requirement.name)
            waiting.append((other, frozenset(requirement.extras)))
            if other == PROJECT:  # an extra made of others
                continue
            if other not in pinned:
                raise LookupError(f"{name} needs {other}, which requirements.lock does not have")
            wanted.add(other)
    return [each for each in lock.packages if each.name in wanted]


def _requirements(name: str, extras: Iterable[str]) -> Iterator[Any]:
    """The requirements of an installed package, on any of the machines."""
    from pip._vendor.packaging.requirements import Requirement

    try:
        texts = distribution(name).requires or []
    except PackageNotFoundError:  # a package for other Pythons: assume that it needs nothing
        return
    for text in texts:
        requirement = Requirement(text)
        if requirement.marker is None or any(
            requirement.marker.evaluate(each | {"extra": extra})
            for each in _environments()
            for extra in ("", *extras)
        ):
            yield requirement


def _environments() -> Iterator[dict[str, str]]:
    for machine in MACHINES:
        for python in PYTHONS:
            yield {
                "sys_platform": "linux",
                "platform_system": "Linux",
                "os_name": "posix",
                "platform_machine": machine,
                "python_full_version": python,
                "python_version": ".".join(python.split(".")[:2]),
                "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
            }


def image_locks() -> dict[Path, str]:
    lock = parse(LOCKS[0].read_text())
    return {
        path: Lock(IMAGE_HEADER, needed(extras, lock)).text() for path, extras in IMAGES.items()
    }


def write() -> list[str]:
    index = Index()
    for path in LOCKS:
        lock = parse(path.read_text())
        packages = [each._replace(hashes=index.hashes(each)) for each in lock.packages]
        path.write_text(Lock(lock.header, packages).text())
    for path, text in image_locks().items():
        path.write_text(text)
    return []


def faults() -> Iterator[str]:
    for path in LOCKS:
        for each in parse(path.read_text()).packages:
            if not each.hashes:
                yield f"{path.name}: {each.requirement} has no hash; run make locks"
    for path, text in image_locks().items():
        if not path.exists() or path.read_text() != text:
            yield f"{path.name} is stale; run make locks"


if __name__ == "__main__":
    sys.exit(carry_out(__doc__, {"": write, "--check": faults}))
