"""A servicer whose topics are spread over instances.

Around every method that names a topic: it is answered with NOT_OWNER, before anything changes,
where another instance holds the topic. What lists topics is asked of all instances.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import ServiceDescriptor
from grpc import aio

from seqgate.types import InvalidNameError, TopicName
from services.errors import DomainError
from services.placement.core.placing import Item, Page, merged
from services.placement.ports import PlacementUnavailable
from services.placement.service import Places
from services.runtime.refused import Refused, answer

RETRY_AFTER_S: Final = 0.5
"""What a caller is told to wait when an instance does not say what it has."""

LIST_BYTES_MAX: Final = 4 * 1024 * 1024
"""A page ends before it is larger than this, in bytes; one of what it lists it always holds."""

Context = aio.ServicerContext[Any, Any]
Method = Callable[[Any, Context], Any]


class Listing(NamedTuple):
    """A method that lists what all instances have, unless its request names a topic.

    Attributes:
        items: which field of a response has what is listed.
        key: by what it is ordered; the parts joined by slashes are a page's token.
        limit: how many a page holds unless asked otherwise.
    """

    items: str
    key: Callable[[Any], tuple[str, ...]]
    limit: int


class Guarding(NamedTuple):
    """What there is to know of a service's methods.

    Attributes:
        reads: those that change nothing, and go on while a topic is moved.
        creates: whether a request may make its topic.
        lists: those that list topics.
    """

    reads: frozenset[str]
    creates: Callable[[Any], bool]
    lists: Mapping[str, Listing]


class Guard:
    """Used like the servicer that it stands before. See the module."""

    def __init__(
        self,
        servicer: object,
        service: ServiceDescriptor,
        guarding: Guarding,
        places: Places,
        stubs: Sequence[Any],
    ) -> None:
        """
        Args:
            service: whose methods the servicer has.
            stubs: of the other instances.
        """
        self._places = places
        self._creates = guarding.creates
        self._stubs = stubs
        for method in service.methods:
            behaviour: Method = getattr(servicer, method.name)
            reads = method.name in guarding.reads
            if method.client_streaming:
                guarded: Method = self._opening(behaviour)
            elif method.server_streaming:
                assert reads
                guarded = self._streaming(behaviour)
            else:
                guarded = self._reading(behaviour) if reads else self._writing(behaviour)
            if method.name in guarding.lists:
                listing = guarding.lists[method.name]
                guarded = self._listing(guarded, behaviour, method.name, listing)
            setattr(self, method.name, guarded)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    # ---- kinds of methods

    def _reading(self, behaviour: Method) -> Method:
        async def reading(request: Any, context: Context) -> Any:
            topic = await self._checked(request)
            if topic is None:
                return await behaviour(request, context)
            stay = self._places.stay(topic)
            try:
                return await behaviour(request, context)
            finally:  # whether it was refused, or is an answer
                await self._places.check_stayed(topic, stay)

        return reading

    def _writing(self, behaviour: Method) -> Method:
        async def writing(request: Any, context: Context) -> Any:
            topic = await self._checked(request)
            if topic is None:
                return await behaviour(request, context)
            with self._places.writing(topic):
                return await behaviour(request, context)

        return writing

    def _streaming(self, behaviour: Method) -> Method:
        """One that writes to its context by itself."""

        async def streaming(request: Any, context: Context) -> None:
            topic = await self._checked(request)
            stay = None if topic is None else self._places.stay(topic)
            try:
                await behaviour(request, context)
            except DomainError:
                if topic is not None:
                    await self._places.check_stayed(topic, stay)
                raise

        return streaming

    def _opening(self, behaviour: Method) -> Method:
        """A stream whose first request names the topic. Whatever writes then asks again by itself,
        for a move may begin at any time."""

        async def opening(requests: AsyncIterator[Any], context: Context) -> None:
            first = await context.read()
            if first is not aio.EOF:
                topic = await self._checked(first.open, first)
                if topic is not None:
                    self._places.check_writable(topic)
            unread: Any = _Unread(context, first)
            await behaviour(requests, unread)

        return opening

    def _listing(self, guarded: Method, behaviour: Method, name: str, listing: Listing) -> Method:
        async def listed(request: Any, context: Context) -> Any:
            if request.local:
                return await behaviour(request, context)
            if getattr(request, "topic", ""):
                return await guarded(request, context)
            local = type(request)()
            local.CopyFrom(request)
            local.local = True
            own = await behaviour(request, context)  # what is wrong with it is said here
            others = [_told(getattr(stub, name)(local)) for stub in self._stubs]
            pages = [own, *await asyncio.gather(*others)]
            return _merged(listing, pages, request.page_size or listing.limit)

        return listed

    # ---- topics

    async def _checked(self, request: Any, whole: Any = None) -> str | None:
        """The topic that a request names, if it is here, or nowhere. None: it names none; the
        servicer says what is wrong with that."""
        topic = request.topic
        try:
            TopicName.parse(topic)
        except InvalidNameError:
            return None
        await self._places.check(topic, create=self._creates(request if whole is None else whole))
        return str(topic)


class _Unread:
    """A stream's context, of which one request was read already."""

    def __init__(self, context: Context, first: Any) -> None:
        self._context = context
        self._unread = [first]

    async def read(self) -> Any:
        return self._unread.pop() if self._unread else await self._context.read()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


async def _told(call: Awaitable[Any]) -> Any:
    try:
        return await answer(call)
    except Refused as error:
        raise PlacementUnavailable(
            "an instance does not say what it has",
            retry_after_s=RETRY_AFTER_S,
            **({"because": error.reason} if error.reason else {}),
        ) from error


def _merged(listing: Listing, responses: Sequence[Any], limit: int) -> Any:
    pages = [
        Page(
            [Item(listing.key(each), each, each.ByteSize()) for each in items],
            bool(response.next_page_token),
        )
        for response in responses
        for items in [getattr(response, listing.items)]
    ]
    values, more = merged(pages, limit=limit, bytes_max=LIST_BYTES_MAX)
    response = type(responses[0])()
    getattr(response, listing.items).extend(values)
    if more:
        response.next_page_token = "/".join(listing.key(values[-1]))
    return response
