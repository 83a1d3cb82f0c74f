"""Settings of the dispatcher service: SEQGATE_DISPATCHER_<NAME>."""

from typing import Annotated, ClassVar, Final, Self

from pydantic import Field, model_validator

from seqgate.services.runtime.config import (
    CallerConfig,
    Port,
    Seconds,
    Target,
    TopicPattern,
    settings_for,
)

EVERYWHERE: Final = ("", "0.0.0.0", "::")  # noqa: S104
"""Hosts that can be listened on, but not connected to."""


class DispatcherConfig(CallerConfig):
    """The settings of the dispatcher service."""

    model_config = settings_for("dispatcher")
    service: ClassVar[str] = "dispatcher"

    listen: Port = "127.0.0.1:7704"

    advertise: str = ""
    """host:port under which clients reach this instance: other instances redirect them here for the
    subscriptions that it owns. Empty: the value of listen, which must then be a single address,
    and not port 0."""

    ledger_target: Target = "127.0.0.1:7702"
    """The ledger service: host:port, or dns:///name:port to balance over its replicas."""

    cursor_target: Target = "127.0.0.1:7703"
    """The cursor service, as for ledger_target."""

    call_timeout_s: Seconds = 5
    """The time limit of a call to the ledger or cursor service."""

    filter_target: Target = "127.0.0.1:7705"
    """The filter service, as for ledger_target. Only subscriptions with filters need it."""

    filter_timeout_s: Seconds = 1
    """The time limit of a call to the filter service. Reading a subscription's log waits for
    verdicts up to this time; then the subscription's policy decides about entries without one."""

    lease_s: Annotated[float, Field(ge=0.3, le=3600)] = 10
    """The duration of a subscription's lease, which is renewed in time. When an instance dies,
    delivery on its subscriptions stops for at most this time."""

    idle_timeout_s: Seconds = 60
    """The time after which a subscription without consumers is released."""

    dead_letter_refused_max_s: Annotated[float, Field(ge=0, le=31_536_000)] = 86_400
    """How long a letter that the dead letter topic refuses is retried, in seconds; its key waits
    meanwhile. Then its entry is passed: acknowledged, counted and logged."""

    filter_failed_max_s: Annotated[float, Field(gt=0, le=31_536_000)] = 86_400
    """How long an entry waits after a failure of a filter, if the subscription's policy is PARK, in
    seconds. Then it goes to the dead letter topic."""

    read_entries_max: Annotated[int, Field(ge=1, le=10_000)] = 500
    """The most entries read from the log at a time."""

    key_parked_max: Annotated[int, Field(ge=1, le=1_000_000)] = 1_000
    """The most waiting entries of a key that are kept in memory. Further ones are read again when
    there is room."""

    consumer_parked_max: Annotated[int, Field(ge=1, le=10_000_000)] = 20_000
    """The same, for all keys of a consumer."""

    delayed_max: Annotated[int, Field(ge=1, le=1_000_000)] = 20_000
    """The most delayed messages of a subscription that are kept in memory, those due soonest.
    Further ones are read again in time."""

    delayed_bytes_max: Annotated[int, Field(ge=1, le=16 * 1024 * 1024 * 1024)] = 32 * 1024 * 1024
    """The same in bytes, approximately: 1,200 for each message, plus its key."""

    all_delayed_bytes_max: Annotated[int, Field(ge=1, le=64 * 1024 * 1024 * 1024)] = (
        128 * 1024 * 1024
    )
    """The same, for all subscriptions together; each keeps at least 100 messages."""

    cache_bytes_max: Annotated[int, Field(ge=0, le=16 * 1024 * 1024 * 1024)] = 64 * 1024 * 1024
    """The most bytes of a subscription's entries that are cached between reading and sending.
    Entries that are not cached are fetched again."""

    caches_bytes_max: Annotated[int, Field(ge=0, le=64 * 1024 * 1024 * 1024)] = 256 * 1024 * 1024
    """The same, for all subscriptions together."""

    history_bytes_max: Annotated[int, Field(ge=0, le=64 * 1024 * 1024 * 1024)] = 32 * 1024 * 1024
    """The most bytes of the history of messages, of all subscriptions together: their deliveries,
    failures and acknowledgements, and the verdicts of filters. The oldest are forgotten. 0: no
    history."""

    audit_topics: tuple[TopicPattern, ...] = ()
    """The topics whose history is also published, for as long as the ledger keeps it: patterns of
    tenant/namespace/name with * and ?, which stop at a slash. That of orders goes to
    orders-AUDIT, which has no audit topic itself."""

    stream_bytes_max: Annotated[int, Field(ge=1, le=1024 * 1024 * 1024)] = 8 * 1024 * 1024
    """The most bytes of entries fetched for one consumer and not sent yet. While there are none, an
    entry of any size is fetched."""

    streams_bytes_max: Annotated[int, Field(ge=1, le=64 * 1024 * 1024 * 1024)] = 128 * 1024 * 1024
    """The most bytes of entries on their way to all consumers together. Beyond that, a consumer
    waits until others have read theirs. (While it is sent, an entry takes up to three times its
    size.)"""

    slow_consumer_s: Seconds = 10
    """How long a consumer may go without reading its deliveries while others wait for room; then
    its stream ends with SLOW_CONSUMER."""

    consumers_max: Annotated[int, Field(ge=1, le=10_000)] = 1_000
    """The most consumers of a subscription."""

    subscriptions_max: Annotated[int, Field(ge=1, le=100_000)] = 1_000
    """The most subscriptions that this instance owns."""

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
        """The address under which clients reach this instance."""
        return self.advertise or self.listen
