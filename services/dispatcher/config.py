"""Settings of the dispatcher service: SEQGATE_DISPATCHER_<NAME>."""

from typing import Annotated, ClassVar, Final, Self

from pydantic import Field, model_validator

from seqgate.services.runtime.config import CallerConfig, Port, Seconds, settings_for

EVERYWHERE: Final = ("", "0.0.0.0", "::")  # noqa: S104
"""Hosts to listen on that are not addresses to connect to."""


class DispatcherConfig(CallerConfig):
    """What the dispatcher service can be told."""

    model_config = settings_for("dispatcher")
    service: ClassVar[str] = "dispatcher"

    listen: Port = "127.0.0.1:7704"

    advertise: str = ""
    """host:port under which clients reach this very instance: they are sent here when they ask
    another one for a subscription that this one has. Empty: where it listens, which must be an
    address of its own then, not all of a machine's, and not port 0."""

    ledger_target: str = "127.0.0.1:7702"
    """The ledger service: host:port, or dns:///name:port to be balanced over its replicas."""

    cursor_target: str = "127.0.0.1:7703"
    """The cursor service, as for ledger_target."""

    call_timeout_s: Seconds = 5
    """How long one answer of either may take."""

    filter_target: str = "127.0.0.1:7705"
    """The filter service, as for ledger_target. Nobody needs it but subscriptions with filters."""

    filter_timeout_s: Seconds = 1
    """How long one answer of it may take. Reading a subscription's log waits for it as long at
    most: what there is no verdict of then, the subscription's policy decides."""

    lease_s: Annotated[float, Field(ge=0.3, le=3600)] = 10
    """For how long a subscription is leased; it is renewed in time. When an instance dies, its
    subscriptions stand still for as long at most."""

    idle_timeout_s: Seconds = 60
    """After how long a subscription without consumers is let go."""

    dead_letter_refused_max_s: Annotated[float, Field(ge=0, le=31_536_000)] = 86_400
    """How long a letter is tried that the dead letter topic refuses, in seconds: its key waits as
    long. Then its entry is passed: acknowledged, counted and logged."""

    filter_failed_max_s: Annotated[float, Field(gt=0, le=31_536_000)] = 86_400
    """How long an entry waits at which a filter failed, where the subscription's policy is to park
    it, in seconds. Then it goes to the dead letter topic."""

    read_entries_max: Annotated[int, Field(ge=1, le=10_000)] = 500
    """How many entries are taken in at a time."""

    key_parked_max: Annotated[int, Field(ge=1, le=1_000_000)] = 1_000
    """Of how many entries of a key it is remembered that they wait. What is beyond is read again
    when there is room."""

    consumer_parked_max: Annotated[int, Field(ge=1, le=10_000_000)] = 20_000
    """The same, of all keys of a consumer."""

    delayed_max: Annotated[int, Field(ge=1, le=1_000_000)] = 20_000
    """How many messages that are to be delivered later are remembered, of each subscription: those
    that are due soonest. What is beyond is read again in time."""

    delayed_bytes_max: Annotated[int, Field(ge=1, le=16 * 1024 * 1024 * 1024)] = 32 * 1024 * 1024
    """The same in bytes, about: 1,200 for each, and its key."""

    all_delayed_bytes_max: Annotated[int, Field(ge=1, le=64 * 1024 * 1024 * 1024)] = (
        128 * 1024 * 1024
    )
    """The same, of all subscriptions together; each remembers 100 messages, whatever others do."""

    cache_bytes_max: Annotated[int, Field(ge=0, le=16 * 1024 * 1024 * 1024)] = 64 * 1024 * 1024
    """How many bytes of entries are kept, of each subscription, from when they are read until they
    are sent. What is not kept is fetched again."""

    caches_bytes_max: Annotated[int, Field(ge=0, le=64 * 1024 * 1024 * 1024)] = 256 * 1024 * 1024
    """The same, of all subscriptions together."""

    stream_bytes_max: Annotated[int, Field(ge=1, le=1024 * 1024 * 1024)] = 8 * 1024 * 1024
    """How many bytes of entries that were fetched for one consumer are not sent yet. One entry is
    fetched, whatever its size."""

    streams_bytes_max: Annotated[int, Field(ge=1, le=64 * 1024 * 1024 * 1024)] = 128 * 1024 * 1024
    """How many bytes of entries are on their way to all consumers together. Who needs more waits
    until others have read what they are sent. (An entry takes up to three times its size while it
    is sent.)"""

    slow_consumer_s: Seconds = 10
    """For how long a consumer may not read what it is sent while others wait for room; then it is
    cut off."""

    consumers_max: Annotated[int, Field(ge=1, le=10_000)] = 1_000
    """How many consumers a subscription may have."""

    subscriptions_max: Annotated[int, Field(ge=1, le=100_000)] = 1_000
    """How many subscriptions this instance may have."""

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        host, _, port = self.listen.rpartition(":")
        if not self.advertise and (host.strip("[]") in EVERYWHERE or int(port) == 0):
            raise ValueError(
                "advertise is required: clients cannot connect to the address in listen"
            )
        return self

    @property
    def owner(self) -> str:
        """Where clients reach this instance."""
        return self.advertise or self.listen
