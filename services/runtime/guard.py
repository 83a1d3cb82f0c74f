"""Authentication and authorization of calls, before their handlers.

A call is authorized before anything changes, by each of its messages that names a resource. An open
stream is authorized again when the rules change. The caller is authenticated once, at the start of
the call: a token or certificate that expires later does not end it.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from grpc import aio

from seqgate.services.errors import DomainError, Kind
from seqgate.services.runtime.access import EVERY, Access, Need, Part, Topics
from seqgate.services.runtime.identity import Principal, of_certificate
from seqgate.services.runtime.refusal_log import Group, RefusalLog
from seqgate.services.runtime.rights import Right, Rights, Shown
from seqgate.services.runtime.tokens import InvalidToken, MissingCredentials, Tokens
from seqgate.watched import Watched

NEEDS_MAX: Final = 1_000
"""The most needs of a stream that are checked again when the rules change; others are checked with
the next message that has them."""

BEARER: Final = "bearer "

Context = Any
"""A ServicerContext or a wrapper of one."""


class PermissionDenied(DomainError):
    """No rule grants the caller this right: `principal` needs `verb` on `topic` and
    `subscription`."""

    kind = Kind.DENIED
    reason = "PERMISSION_DENIED"


class Guard:
    def __init__(
        self,
        access: Watched[Access],
        tokens: Tokens | None,
        rights: Rights,
        *,
        certificates: bool,
    ) -> None:
        """
        Args:
            access: the rules in force.
            tokens: verifies tokens; None: tokens are ignored.
            rights: the rights that each method needs; a method without an entry is denied.
            certificates: whether client certificates authenticate callers.
        """
        self._access = access
        self._tokens = tokens
        self._rights = rights
        self._certificates = certificates
        self.denials = RefusalLog()

    @property
    def access(self) -> Access:
        return self._access.get()

    def begin(self, method: str, context: Context) -> "Judged":
        """Authenticate the caller of a new call. A method without rights is denied at its first
        message.

        Raises:
            MissingCredentials, InvalidToken, TokenExpired, TokenNotYetValid, WrongAudience,
            WrongIssuer: the caller is not authenticated.
        """
        try:
            principal = self._principal(context)
        except DomainError as refusal:
            record_denial(self.denials, refusal, method, "", context.peer())
            raise
        right = self._rights.get(method)
        if right is None:
            right = _NOBODYS
        return Judged(self, method, right, principal, context)

    def _principal(self, context: Context) -> Principal:
        given = [
            value for name, value in context.invocation_metadata() or () if name == "authorization"
        ]
        if given and self._tokens is not None:
            return self._tokens.principal(_bearer(given))
        if self._certificates:
            principal = of_certificate(context.auth_context())
            if principal is not None:
                return principal
        raise MissingCredentials(
            "authentication required: send a token or a client certificate that this service "
            "accepts"
        )


def _bearer(given: Sequence[str | bytes]) -> str:
    if len(given) > 1 or not isinstance(given[0], str):
        raise InvalidToken("more than one authorization header")
    if not given[0].lower().startswith(BEARER):
        raise InvalidToken("authorization must be Bearer and a token")
    return given[0][len(BEARER) :].strip()


_NOBODYS: Final = Right(lambda _: [Need(frozenset(), None, None)])


class Judged:
    """The context of a call, for its handler: messages read from it are authorized. All else is
    delegated to the call's own context."""

    def __init__(
        self, guard: Guard, method: str, right: Right, principal: Principal, context: Context
    ) -> None:
        self._guard = guard
        self._method = method
        self._right = right
        self._principal = principal
        self._context = context
        self._peer = context.peer()  # grpc crashes if called after the call ended
        self._access = guard.access
        self._is_service = self._access.has_role(principal, right.roles)
        self._given: dict[Need, None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    @property
    def principal(self) -> Principal:
        return self._principal

    def judge(self, message: Any) -> None:
        """Authorize a message. Raises PermissionDenied."""
        if self._guard.access is not self._access:
            self._judge_again()
        if self._is_service:
            return
        needs = self._right.needs(message)
        if not needs and not self._given:
            self._deny("the request names no topic to check rights on", None)
        for need in needs:
            if need not in self._given:
                self._check(need)
                if len(self._given) >= NEEDS_MAX:
                    self._given.clear()
                self._given[need] = None

    def shown(self, reply: Any) -> Any:
        """A reply without the items that the caller may not read."""
        shown = self._right.shown
        if shown is None or self._is_service:
            return reply
        items = getattr(reply, shown.field)
        kept = [each for each in items if self._may_read(shown, each)]
        if len(kept) < len(items):
            del items[:]
            items.extend(kept)
        return reply

    def _may_read(self, shown: Shown, item: Any) -> bool:
        return all(self._access.allows(self._principal, need) for need in shown.needs(item))

    async def judging(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The authorized messages of a stream, for a handler that iterates over them."""
        async for message in messages:
            self.judge(message)
            yield message

    async def read(self) -> Any:
        message = await self._context.read()
        if message is not aio.EOF:
            self.judge(message)
        return message

    async def write(self, message: Any) -> None:
        if self._guard.access is not self._access:
            self._judge_again()
        await self._context.write(message)

    def _judge_again(self) -> None:
        was_service = self._is_service
        self._access = self._guard.access
        self._is_service = self._access.has_role(self._principal, self._right.roles)
        if self._is_service:
            return
        if was_service:  # a role needs no rights on topics, so no needs were kept
            self._deny(f"{self._principal} no longer has this role", None)
        for need in self._given:
            self._check(need)

    def _check(self, need: Need) -> None:
        if not self._access.allows(self._principal, need):
            verbs = " or ".join(sorted(verb.value for verb in need.verbs))
            self._deny(f"no rule allows {self._principal} to {verbs or 'call this method'}", need)

    def _deny(self, message: str, need: Need | None) -> None:
        refusal = PermissionDenied(message)
        refusal.details |= {"principal": str(self._principal)}
        if need is not None:
            refusal.details |= _details(need)
        principal = str(self._principal)
        record_denial(self._guard.denials, refusal, self._method, principal, self._peer)
        raise refusal


def caller_of(context: Context) -> str:
    """The caller to record with a change: the principal or, without authentication, the address."""
    return str(context.principal) if isinstance(context, Judged) else str(context.peer())


def record_denial(
    denials: RefusalLog, refusal: DomainError, method: str, principal: str, peer: str
) -> None:
    """Count a denial. Denials are logged per caller."""
    about: dict[str, Any] = {
        name: refusal.details.get(name) for name in ("verb", "topic", "subscription")
    }
    group = Group(refusal.reason, method, principal)
    denials.record("denied", group, peer=peer, **about)


def _details(need: Need) -> Mapping[str, str]:
    details = {"verb": "|".join(sorted(verb.value for verb in need.verbs))}
    if need.topics is not None:
        details["topic"] = _topics(need.topics)
    if need.subscriptions not in (None, EVERY):
        details["subscription"] = _part(need.subscriptions)
    return details


def _topics(topics: Topics) -> str:
    return "/".join(map(_part, topics))


def _part(part: Part | None) -> str:
    if part is None:
        return "*"
    return part.text + ("*" if part.is_open else "")
