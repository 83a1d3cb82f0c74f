"""Settings of the filter service: SEQGATE_FILTER_<NAME>."""

from typing import Annotated, ClassVar

from pydantic import Field

from seqgate.services.runtime.config import Port, WorkersConfig, settings_for


class FilterConfig(WorkersConfig):
    """The settings of the filter service."""

    model_config = settings_for("filter")
    service: ClassVar[str] = "filter"

    listen: Port = "127.0.0.1:7705"

    programs_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """The most compiled expressions cached, by their text."""

    program_bytes_max: Annotated[int, Field(ge=1024 * 1024, le=16 * 1024 * 1024 * 1024)] = (
        128 * 1024 * 1024
    )
    """The most memory of compiled expressions, in bytes, approximately. Expressions in a stream's
    chains stay as long as the stream does."""

    chain_bytes_max: Annotated[int, Field(ge=1024, le=64 * 1024 * 1024 * 1024)] = 512 * 1024 * 1024
    """The most memory that the chains of all streams take, in bytes, approximately. A chain beyond
    that ends the streams that have been idle for the longest; if all have just started, it is
    refused with SERVICE_BUSY. While there are no others, a chain of any size is accepted."""

    decisions_max: Annotated[int, Field(ge=0, le=100_000_000)] = 200_000
    """The most decisions cached, for all chains together; 0: none."""

    decision_bytes_max: Annotated[int, Field(ge=0, le=64 * 1024 * 1024 * 1024)] = 128 * 1024 * 1024
    """The most memory of cached decisions, in bytes, approximately."""
