"""Settings of the filter service: SEQGATE_FILTER_<NAME>."""

from typing import Annotated, ClassVar

from pydantic import Field

from seqgate.services.runtime.config import Port, ServiceConfig, settings_for


class FilterConfig(ServiceConfig):
    """What the filter service can be told."""

    model_config = settings_for("filter")
    service: ClassVar[str] = "filter"

    listen: Port = "127.0.0.1:7705"

    programs_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """How many compiled expressions are kept, by their text."""

    program_bytes_max: Annotated[int, Field(ge=1024 * 1024, le=16 * 1024 * 1024 * 1024)] = (
        128 * 1024 * 1024
    )
    """How much memory they take, in bytes, roughly. What a stream's chains need stays as long as
    the stream does."""

    chain_bytes_max: Annotated[int, Field(ge=1024, le=64 * 1024 * 1024 * 1024)] = 512 * 1024 * 1024
    """How much memory the chains of all streams take, in bytes, roughly. One beyond that takes the
    room of streams that judged nothing for the longest: they end. It is refused with SERVICE_BUSY
    while all of them have just begun. The largest one finds room alone."""

    decisions_max: Annotated[int, Field(ge=0, le=100_000_000)] = 200_000
    """How many decisions are remembered, of all chains together; 0: none."""

    decision_bytes_max: Annotated[int, Field(ge=0, le=64 * 1024 * 1024 * 1024)] = 128 * 1024 * 1024
    """How much memory they take, in bytes, roughly."""
