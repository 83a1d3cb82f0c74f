"""Settings of the cursor service: SEQGATE_CURSOR_<NAME>."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from seqgate.services.runtime.config import Port, ServiceConfig, settings_for


class CursorConfig(ServiceConfig):
    model_config = settings_for("cursor")
    service: ClassVar[str] = "cursor"

    listen: Port = "127.0.0.1:7703"

    message_bytes_max: Annotated[int, Field(ge=64 * 1024, le=256 * 1024 * 1024)] = 32 * 1024 * 1024
    """The largest gRPC message, in bytes. The default has room for the largest properties of a
    mark-delete position, 16 MiB together."""

    store_path: Path = Path("cursor.db")
    """The SQLite database; its folder must exist."""

    store_bytes_max: Annotated[int, Field(ge=0)] = 0
    """The largest size of the database, in bytes, including its write-ahead log, whose share is a
    sixteenth, at most 64 MiB; busy readers can make the log exceed it. 0: no limit but the disk."""

    store_readers: Annotated[int, Field(ge=1, le=64)] = 2
    """The most concurrent reads of the database."""
