"""The address of Redis, as a URL.

    redis://[user:password@]host[:port][/database]          one server, or one address of several
    redis+sentinel://[...@]host[:port],.../name[/database]  the master of a name, by its Sentinels
    redis+cluster://[...@]host[:port],...                   a cluster, by some of its nodes
    unix:///path[?db=database]                              one server on this machine

With rediss, rediss+sentinel and rediss+cluster all connections use TLS. User and password are those
of Redis; the Sentinels' own are among the options, which follow a question mark.
"""

import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote

REDIS_PORT: Final = 6379
SENTINEL_PORT: Final = 26379
PORT_MAX: Final = 65_535
DATABASE_MAX: Final = 1_000_000

_FORM: Final = re.compile(
    r"([a-z+]+)://(?:([^@/?]*)@)?([^/?@]*)((?:/[^?]*)?)(?:\?(.*))?", re.DOTALL
)
_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s\[\]:%]+)(?::([0-9]{1,5}))?")


class Served(Enum):
    """The kind of deployment."""

    SERVER = auto()
    SOCKET = auto()
    SENTINEL = auto()
    CLUSTER = auto()


class Node(NamedTuple):
    """The address of one process."""

    host: str
    port: int


class RedisUrl(NamedTuple):
    """A parsed URL. `options` and `sentinel` are redis-py's arguments, for Redis and for
    Sentinels."""

    served: Served
    nodes: tuple[Node, ...] = ()
    path: str = ""
    master: str = ""
    database: int = 0
    options: Mapping[str, str | bool] = {}
    sentinel: Mapping[str, str | bool] = {}


_SCHEMES: Final = {
    f"redis{tls}{by}": (served, bool(tls))
    for tls in ("", "s")
    for by, served in (
        ("", Served.SERVER),
        ("+sentinel", Served.SENTINEL),
        ("+cluster", Served.CLUSTER),
    )
} | {"unix": (Served.SOCKET, False)}


def parse_redis_url(text: str) -> RedisUrl:
    """Parse a URL.

    Raises:
        ValueError: the URL is invalid; the message contains no password.
    """
    form = _FORM.fullmatch(text)
    if form is None or form[1] not in _SCHEMES:
        raise ValueError(f"must be {', '.join(f'{each}://' for each in _SCHEMES)} and an address")
    scheme, credentials, hosts, path, query = form.groups(default="")
    served, tls = _SCHEMES[scheme]
    given = _query(query, served, tls=tls)
    options: dict[str, str | bool] = dict(_credentials(credentials))
    options |= {name: value for name, value in given.items() if name not in _OF_SENTINELS}
    if tls:
        options["ssl"] = True
    if served is Served.SOCKET:
        database = str(options.pop("db", "0"))
        if hosts or len(path) < 2:
            raise ValueError("must be unix:///path, with the path of a socket")
        return RedisUrl(served, path=unquote(path), database=_database(database), options=options)
    nodes = tuple(
        _node(host, SENTINEL_PORT if served is Served.SENTINEL else REDIS_PORT)
        for host in hosts.split(",")
    )
    parts = [unquote(part) for part in path.split("/")[1:]]
    master = ""
    if served is Served.SERVER and len(nodes) > 1:
        raise ValueError(
            f"{scheme}:// takes one host; use {scheme}+sentinel or {scheme}+cluster for more"
        )
    if served is Served.SENTINEL:
        master, *parts = parts or [""]
        if not master:
            raise ValueError(f"the master's name is missing: {scheme}://host:port,host:port/name")
    if len(parts) > 1 or (served is Served.CLUSTER and parts not in ([], [""], ["0"])):
        raise ValueError("unexpected text after the address; a cluster has database 0 only")
    sentinel = {
        **{name: value for name, value in options.items() if name.startswith("ssl")},
        **{_OF_SENTINELS[name]: given[name] for name in given if name in _OF_SENTINELS},
    }
    return RedisUrl(
        served,
        nodes,
        master=master,
        database=_database(parts[0] if parts and parts[0] else "0"),
        options=options,
        sentinel=sentinel if served is Served.SENTINEL else {},
    )


def _node(text: str, port: int) -> Node:
    found = _HOST.fullmatch(text)
    if found is None:
        raise ValueError("hosts must be host, host:port or [address]:port, separated by commas")
    number = port if found[2] is None else int(found[2])
    if not 0 < number <= PORT_MAX:
        raise ValueError(f"port must be 1 to {PORT_MAX}")
    return Node(found[1].strip("[]"), number)


def _database(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text[:9]) <= DATABASE_MAX):
        raise ValueError(f"database must be a number up to {DATABASE_MAX:,}")
    return int(text)


def _credentials(text: str) -> dict[str, str]:
    user, _, password = text.partition(":")
    given = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in given.items() if value}


def _query(text: str, served: Served, *, tls: bool) -> dict[str, str | bool]:
    given: dict[str, str | bool] = {}
    for name, value in parse_qsl(text, keep_blank_values=True):
        fits = {
            "db": served is Served.SOCKET,
            "sentinel_username": served is Served.SENTINEL,
            "sentinel_password": served is Served.SENTINEL,
        }.get(name, tls)
        if name not in _OPTIONS or not fits or name in given:
            raise ValueError(f"unknown or duplicate option {name}")
        given[name] = _OPTIONS[name](value)
    return given


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("ssl_check_hostname must be true or false")
    return text.lower() == "true"


def _demand(text: str) -> str:
    if text not in ("none", "optional", "required"):
        raise ValueError("ssl_cert_reqs must be none, optional or required")
    return text


_OPTIONS: Final[Mapping[str, Callable[[str], str | bool]]] = {
    "db": str,
    "ssl_ca_certs": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_cert_reqs": _demand,
    "ssl_check_hostname": _flag,
    "sentinel_username": str,
    "sentinel_password": str,
}

_OF_SENTINELS: Final = {"sentinel_username": "username", "sentinel_password": "password"}
