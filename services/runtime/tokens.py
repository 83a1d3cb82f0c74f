"""Bearer tokens: JWTs of an issuer whose public keys are in a file.

Only signatures without a shared secret are accepted, and each key implies its algorithm: a token
cannot choose one. A token must have exp, aud, iss and sub.
"""

import hashlib
import time
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from seqgate.services.errors import DomainError, Kind
from seqgate.services.runtime.identity import Principal, of_token
from seqgate.watched import OnChange, Watched

LEEWAY_S: Final = 30
"""The tolerated clock difference for exp and nbf, in seconds."""

RSA_BITS_MIN: Final = 2048
"""The shortest RSA key, in bits."""

KEYS_MAX: Final = 100
"""The most keys in a file."""

REMEMBERED_MAX: Final = 10_000
"""The most verified tokens in the cache."""

_PEM_END: Final = b"-----END PUBLIC KEY-----"


class MissingCredentials(DomainError):
    """The call has neither a token nor a client certificate that the service accepts."""

    kind = Kind.UNKNOWN_CALLER
    reason = "MISSING_CREDENTIALS"


class InvalidToken(DomainError):
    """The token is malformed, is signed with an unknown key, or lacks a required claim."""

    kind = Kind.UNKNOWN_CALLER
    reason = "INVALID_TOKEN"


class TokenExpired(DomainError):
    """The token has expired."""

    kind = Kind.UNKNOWN_CALLER
    reason = "TOKEN_EXPIRED"


class TokenNotYetValid(DomainError):
    """The token is not valid yet."""

    kind = Kind.UNKNOWN_CALLER
    reason = "TOKEN_NOT_YET_VALID"


class WrongAudience(DomainError):
    """The token was issued for another audience."""

    kind = Kind.UNKNOWN_CALLER
    reason = "WRONG_AUDIENCE"


class WrongIssuer(DomainError):
    """The token was issued by another issuer."""

    kind = Kind.UNKNOWN_CALLER
    reason = "WRONG_ISSUER"


PublicKey = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey


class _Key:
    def __init__(self, key: Any, key_id: str | None) -> None:
        self.key: PublicKey = key
        self.id = key_id
        self.algorithm = _algorithm(key)


def _algorithm(key: Any) -> str:
    match key:
        case RSAPublicKey() if key.key_size >= RSA_BITS_MIN:
            return "RS256"
        case EllipticCurvePublicKey() if isinstance(key.curve, SECP256R1):
            return "ES256"
        case Ed25519PublicKey():
            return "EdDSA"
    raise ValueError(f"not a public key of RSA ({RSA_BITS_MIN} bits or more), P-256 or Ed25519")


class Tokens:
    def __init__(self, keys_file: Path, *, audience: str, issuer: str, on_change: OnChange) -> None:
        """
        Args:
            keys_file: a JWKS (JSON Web Key Set), or public keys in PEM; read again when it changes.
            audience: the required aud of tokens.
            issuer: the required iss of tokens.
            on_change: see Watched.

        Raises:
            OSError, ValueError: the file cannot be used.
        """
        self._keys = Watched([keys_file], lambda: read_keys(keys_file), on_change)
        self._audience = audience
        self._issuer = issuer
        self._known: dict[bytes, tuple[Principal, float]] = {}
        self._known_by: list[_Key] = []

    def principal(self, token: str) -> Principal:
        """The subject of a token.

        Raises:
            InvalidToken, TokenExpired, TokenNotYetValid, WrongAudience, WrongIssuer: the token is
                rejected.
        """
        keys = self._keys.get()
        if keys is not self._known_by:
            self._known.clear()
            self._known_by = keys
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        known = self._known.get(digest)
        if known is not None and time.time() < known[1]:
            return known[0]
        principal, expires_s = self._verified(token, keys)
        if len(self._known) >= REMEMBERED_MAX:
            self._known.clear()
        self._known[digest] = principal, expires_s + LEEWAY_S
        return principal

    def _verified(self, token: str, keys: list[_Key]) -> tuple[Principal, float]:
        claims = self._claims(token, keys)
        principal = of_token(claims)
        if principal is None:
            raise InvalidToken("the token has no usable sub")
        return principal, float(claims["exp"])

    def _claims(self, token: str, keys: list[_Key]) -> dict[str, Any]:
        try:
            header = jwt.get_unverified_header(token)
        except jwt.InvalidTokenError:
            raise InvalidToken("the token is malformed") from None
        refusal: DomainError = InvalidToken("the token is not signed with a known key")
        for key in keys:
            if key.algorithm != header.get("alg"):
                continue
            if None not in (key.id, header.get("kid")) and key.id != header.get("kid"):
                continue
            try:
                return dict(
                    jwt.decode(
                        token,
                        key.key,
                        algorithms=[key.algorithm],
                        audience=self._audience,
                        issuer=self._issuer,
                        leeway=LEEWAY_S,
                        options={"require": ["exp", "aud", "iss", "sub"]},
                    )
                )
            except jwt.InvalidSignatureError:
                continue
            except jwt.InvalidTokenError as error:
                refusal = _refusal(error)
                break
        raise refusal


def _refusal(error: jwt.InvalidTokenError) -> DomainError:
    """The error for a token with a valid signature. It quotes nothing from the token."""
    match error:
        case jwt.ExpiredSignatureError():
            return TokenExpired("the token has expired")
        case jwt.ImmatureSignatureError():
            return TokenNotYetValid("the token is not valid yet")
        case jwt.InvalidAudienceError():
            return WrongAudience("the token's aud is another audience")
        case jwt.InvalidIssuerError():
            return WrongIssuer("the token's iss is another issuer")
        case jwt.MissingRequiredClaimError(claim=claim):
            return InvalidToken(f"the token has no {claim}")
    return InvalidToken("a claim of the token is invalid")


def read_keys(file: Path) -> list[_Key]:
    """The public keys in a file.

    Raises:
        OSError, ValueError: the file cannot be read, has no usable key, or has a private key.
    """
    held = file.read_bytes()
    if b"PRIVATE KEY" in held:
        raise ValueError(f"{file}: contains a private key, expected public keys")
    try:
        keys = _of_pem(held) if _PEM_END in held else _of_jwks(held)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if not 0 < len(keys) <= KEYS_MAX:
        raise ValueError(f"{file}: must hold 1 to {KEYS_MAX} public keys for signatures")
    return keys


def _of_pem(held: bytes) -> list[_Key]:
    blocks = held.split(_PEM_END)[:-1]
    return [_Key(load_pem_public_key(block.lstrip() + _PEM_END + b"\n"), None) for block in blocks]


def _of_jwks(held: bytes) -> list[_Key]:
    try:
        keys = jwt.PyJWKSet.from_json(held.decode()).keys
    except (jwt.PyJWTError, ValueError, AttributeError, TypeError) as error:
        raise ValueError("neither a JSON Web Key Set nor PEM public keys") from error
    found = []
    for each in keys:
        try:
            found.append(_Key(each.key, each.key_id))
        except ValueError:  # an issuer may publish keys for other purposes
            continue
        if each.public_key_use not in (None, "sig"):
            found.pop()
    return found
