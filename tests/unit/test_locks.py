"""Only files whose hashes are in a lock are installed."""

import re

import pytest

from tools.dev import locks
from tools.dev.locks import IMAGES, LOCKS, ROOT, Lock, Pinned, parse


def test_every_package_of_every_lock_has_hashes_and_the_images_locks_are_part_of_the_whole() -> (
    None
):
    assert list(locks.faults()) == []
    whole = {each.requirement: each.hashes for each in parse(LOCKS[0].read_text()).packages}
    for path in IMAGES:
        part = parse(path.read_text()).packages
        assert all(whole[each.requirement] == each.hashes for each in part)
        assert locks.BUILDS in {each.name for each in part}
    for path in (*LOCKS, *IMAGES):
        for each in parse(path.read_text()).packages:
            assert all(re.fullmatch(r"[0-9a-f]{64}", hash_) for hash_ in each.hashes)


def test_a_lock_is_read_as_written() -> None:
    lock = Lock(
        "# Ours.\n",
        [
            Pinned("Foo_Bar==1.0", ("a" * 64, "b" * 64)),
            Pinned('baz==2; python_version < "3.12"', ()),
        ],
    )
    assert parse(lock.text()) == lock
    assert [(each.name, each.version) for each in lock.packages] == [
        ("foo-bar", "1.0"),
        ("baz", "2"),
    ]


@pytest.mark.parametrize("line", ["foo", "foo>=1", "-e ."])
def test_an_unpinned_package_is_not_part_of_a_lock(line: str) -> None:
    with pytest.raises(ValueError, match="pinned"):
        parse(f"a==1\n{line}\n")


def test_a_lock_without_a_hash_or_a_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = parse(LOCKS[0].read_text())
    less = whole._replace(packages=[each for each in whole.packages if each.name != "redis"])
    with pytest.raises(LookupError, match="redis"):
        locks.needed(["services"], less)
    bare = whole._replace(packages=[each._replace(hashes=()) for each in whole.packages[:1]])
    monkeypatch.setattr(locks, "parse", lambda _: bare)
    monkeypatch.setattr(locks, "image_locks", dict)
    assert all("has no hash" in each for each in locks.faults())
    assert len(list(locks.faults())) == len(LOCKS)


@pytest.mark.parametrize("path", ["tools/dev/venv.sh", "deploy/docker/Dockerfile", "Makefile"])
def test_every_package_from_an_index_is_installed_by_hash(path: str) -> None:
    text = (ROOT / path).read_text().replace("\\\n", " ")
    commands = re.findall(r"(?:pip install|^\s*pip) [^&\n]*", text, flags=re.MULTILINE)
    assert commands
    for command in commands:
        is_ours = "--no-deps" in command  # this project, without dependencies
        assert is_ours or "--require-hashes" in command or "$@" in command, command
