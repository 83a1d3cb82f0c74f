"""Who calls: a principal, and the kinds of names that it may have.

    uri:spiffe://shop.example/ns/shop/sa/checkout   a certificate's URI (SPIFFE), if it has one
    dns:checkout.shop.svc                           else its DNS names
    cn:checkout                                     else its common name
    sub:alice@example.com                           a token's subject

The kind is a part of the name, so that nobody who hands out tokens can hand out the name of a
certificate, or the other way round.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

KINDS: Final = ("uri", "dns", "cn", "sub")

NAME_CHARS_MAX: Final = 1_024
"""The longest name."""


class Principal(NamedTuple):
    """Somebody whose names were proven. Rules count that are for any of them."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return self.names[0]


_PROPERTIES: Final = (("uri", "peer_uri"), ("dns", "peer_dns"), ("cn", "x509_common_name"))
"""What gRPC calls the parts of a certificate that it has verified."""


def of_certificate(properties: Mapping[str, Sequence[bytes]]) -> Principal | None:
    """Who the other end of a connection is, by what gRPC says of it (ServicerContext.auth_context);
    None: it has no certificate, or one without a name that can be one."""
    for kind, name in _PROPERTIES:
        held = (value.decode("utf-8", "replace") for value in properties.get(name) or ())
        names = tuple(f"{kind}:{each}" for each in held if is_name(each))
        if names:
            return Principal(names)
    return None


def of_token(claims: Mapping[str, object]) -> Principal | None:
    """Whom a token is about; None: nobody who can be one."""
    subject = claims.get("sub")
    if not isinstance(subject, str) or not is_name(subject):
        return None
    return Principal((f"sub:{subject}",))


def is_name(text: str) -> bool:
    """Whether a text, without its kind, can be a name."""
    return 0 < len(text) <= NAME_CHARS_MAX and text.isprintable() and "\ufffd" not in text
