"""Addresses of services: HOST:PORT, or a target of gRPC such as dns:///name:port."""

from typing import Final

from seqgate.errors import InvalidRequestError

PORT_MAX: Final = 65_535

_SCHEMES: Final = ("dns", "ipv4", "ipv6", "unix", "unix-abstract")
"""The schemes of gRPC's targets that clients take."""


def checked_address(text: str) -> str:
    """The address, unchanged. Raises InvalidRequestError if it is none."""
    scheme, separator, _ = text.partition("://")
    if separator and scheme not in _SCHEMES:
        raise InvalidRequestError(f"{text!r} is not HOST:PORT: leave out the scheme {scheme}://")
    if not _is_address(text):
        raise InvalidRequestError(f"{text!r} is not HOST:PORT")
    return text


def _is_address(text: str) -> bool:
    if text.startswith(("unix:", "unix-abstract:")):
        return not text.endswith(":")
    addresses = text.rpartition("/")[2] if text.startswith("dns:") else text
    for scheme in ("dns:", "ipv4:", "ipv6:"):
        addresses = addresses.removeprefix(scheme)
    return all(map(_has_port, addresses.split(",")))


def _has_port(text: str) -> bool:
    host, _, port = text.rpartition(":")
    is_host = host and (":" not in host or (host.startswith("[") and host.endswith("]")))
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
    return bool(is_host and 0 < number <= PORT_MAX)
