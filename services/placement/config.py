"""Settings of a service whose topics are spread over instances."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from services.runtime.config import CallerConfig, Port

INSTANCES_MAX = 1_000
"""How many instances a service may have."""


class PlacedConfig(CallerConfig):
    """What such a service can be told besides."""

    instances: Annotated[tuple[Port, ...], Field(max_length=INSTANCES_MAX)] = ()
    """The addresses, host:port, under which callers reach the instances of this service, the same
    list for each of them. Each topic is held by one; the first instance also records which. More
    may be added at the end. Empty: there is one instance, and nothing to be recorded."""

    advertised: str = ""
    """Which of `instances` this one is."""

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if len(set(self.instances)) < len(self.instances):
            raise ValueError("instances are named once each")
        if bool(self.advertised or self.instances) and self.advertised not in self.instances:
            raise ValueError("advertised is one of instances")
        return self
