"""Principals: the verified names of callers, and their kinds.

    uri:spiffe://shop.example/ns/shop/sa/checkout   a certificate's URI (SPIFFE), if it has one
    dns:checkout.shop.svc                           else its DNS names
    cn:checkout                                     else its common name
    sub:alice@example.com                           a token's subject

The kind is part of the name, so that an issuer of tokens cannot grant a certificate's name, nor an
issuer of certificates a token's.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

KINDS: Final = ("uri", "dns", "cn", "sub")

NAME_CHARS_MAX: Final = 1_024
"""The longest name of a principal, in characters."""


class Principal(NamedTuple):
    """An authenticated caller with its names. A rule for any of them applies."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return self.names[0]


_PROPERTIES: Final = (("uri", "peer_uri"), ("dns", "peer_dns"), ("cn", "x509_common_name"))
"""Our kinds, and gRPC's names for these parts of a verified certificate."""


def of_certificate(properties: Mapping[str, Sequence[bytes]]) -> Principal | None:
    """The principal of a client certificate, from gRPC's ServicerContext.auth_context; None: there
    is no certificate, or it has no valid name."""
    for kind, name in _PROPERTIES:
        held = (value.decode("utf-8", "replace") for value in properties.get(name) or ())
        names = tuple(f"{kind}:{each}" for each in held if is_name(each))
        if names:
            return Principal(names)
    return None


def of_token(claims: Mapping[str, object]) -> Principal | None:
    """The principal of a token's subject; None: the subject is not a valid name."""
    subject = claims.get("sub")
    if not isinstance(subject, str) or not is_name(subject):
        return None
    return Principal((f"sub:{subject}",))


def is_name(text: str) -> bool:
    """Whether a text is a valid name, the kind not included."""
    return 0 < len(text) <= NAME_CHARS_MAX and text.isprintable() and "\ufffd" not in text
