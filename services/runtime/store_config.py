"""Settings of a service that has a store: SQLite for one process, or PostgreSQL for several."""

from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import SettingsConfigDict

from seqgate.services.runtime.config import ServiceConfig
from seqgate.services.runtime.postgres import Server, addresses_of
from seqgate.services.runtime.startup import check_database

CONNECTIONS_MAX: Final = 64


def _checked(url: str) -> str:
    if url:
        addresses_of(url)
    return url


class StoreConfig(ServiceConfig):
    model_config = SettingsConfigDict(hide_input_in_errors=True)  # postgres_url may have a password

    store_path: Path = Path("store.db")
    """The SQLite database; its folder must exist. One process uses it. Not to be set with
    postgres_url."""

    store_bytes_max: Annotated[int, Field(ge=0)] = 0
    """The largest size of the SQLite database, in bytes, including its write-ahead log, whose share
    is a sixteenth, at most 64 MiB; busy readers can make the log exceed it. 0: no limit but the
    disk."""

    store_readers: Annotated[int, Field(ge=1, le=CONNECTIONS_MAX)] = 2
    """The most concurrent reads of the database, and of connections for them to PostgreSQL."""

    store_writers: Annotated[int, Field(ge=1, le=CONNECTIONS_MAX)] = 8
    """The most connections to PostgreSQL for changes. (SQLite has one writer.)"""

    postgres_url: Annotated[str, AfterValidator(_checked)] = ""
    """The PostgreSQL database, version 15 or later, instead of a SQLite one: any number of
    processes share it. postgresql://user:password@host:port/database?sslmode=verify-full, with
    several host:port, separated by commas, if no name leads to the primary; the primary is found
    among them. A pooler in between must keep a session for each connection. Empty: none."""

    postgres_migrates: bool = True
    """Whether the service brings the tables to its version's layout when it starts. If not,
    `python -m seqgate.services.<service> --migrate` does, and the service refuses to start
    before."""

    postgres_standby_required: bool = False
    """Whether a primary without a synchronous standby (synchronous_standby_names) is refused. If
    not, it is logged as a warning: a primary that is lost takes acknowledged data with it."""

    @property
    def store(self) -> str:
        """What keeps the data, by its name in health checks."""
        return "postgresql" if self.postgres_url else "sqlite"

    @property
    def postgres(self) -> Server:
        """The server of postgres_url."""
        return Server(
            self.postgres_url,
            writers=self.store_writers,
            readers=self.store_readers,
            needs_standby=self.postgres_standby_required,
        )

    def check(self) -> None:
        super().check()
        if not self.postgres_url:
            check_database(self, "store_path")

    @model_validator(mode="after")
    def _has_one_store(self) -> Self:
        if self.postgres_url and self.store_bytes_max:
            raise ValueError("store_bytes_max limits SQLite; unset it with postgres_url")
        if self.postgres_url and "store_path" in self.model_fields_set:
            raise ValueError("store_path and postgres_url name two stores; unset one of them")
        return self
