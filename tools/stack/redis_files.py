"""Copies of a Redis server's files."""

import os
import shutil
from contextlib import suppress
from pathlib import Path


def copy_files(source: Path, target: Path) -> None:
    """Copy a server's files, all or nothing: if the server rewrites them meanwhile, the target is
    unchanged. The server may keep appending, since it can read a truncated append-only file."""
    scratch = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        shutil.copytree(source, scratch)
    except shutil.Error:
        shutil.rmtree(scratch, ignore_errors=True)
        return
    with suppress(FileNotFoundError):
        shutil.rmtree(target)
    scratch.rename(target)
