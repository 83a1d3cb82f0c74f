"""Settings of the cursor service: SEQGATE_CURSOR_<NAME>."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from seqgate.services.runtime.config import Port, settings_for
from seqgate.services.runtime.store_config import StoreConfig


class CursorConfig(StoreConfig):
    model_config = settings_for("cursor")
    service: ClassVar[str] = "cursor"

    listen: Port = "127.0.0.1:7703"

    message_bytes_max: Annotated[int, Field(ge=64 * 1024, le=256 * 1024 * 1024)] = 32 * 1024 * 1024
    """The largest gRPC message, in bytes. The default has room for the largest properties of a
    mark-delete position, 16 MiB together."""

    store_path: Path = Path("cursor.db")
