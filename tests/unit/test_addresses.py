"""Addresses are checked before they are used, and errors name the service that is not there."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from grpc import aio

from seqgate.client import Client, blocking, connect
from seqgate.client._address import checked_address
from seqgate.client._status import cause_of
from seqgate.errors import InvalidRequestError, UnavailableError, WrongServiceError


@pytest.mark.parametrize(
    "address",
    [
        "localhost:1",
        "127.0.0.1:65535",
        "[::1]:7702",
        "dns:///ledger:7702",
        "dns://8.8.8.8/ledger:7702",
        "ipv4:127.0.0.1:1,127.0.0.1:2",
        "unix:/run/ledger",
        "unix:///run/ledger",
        "unix-abstract:ledger",
    ],
)
def test_an_address_is_a_host_and_a_port_or_a_target_of_grpc(address: str) -> None:
    assert checked_address(address) == address


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://localhost:7702", "leave out the scheme http://"),
        ("https://localhost:7702/", "leave out the scheme https://"),
        ("grpc://localhost:7702", "leave out the scheme grpc://"),
        ("pulsar://localhost:6650", "leave out the scheme pulsar://"),
        ("://localhost:7702", "is not HOST:PORT"),
        ("localhost:7702/", "is not HOST:PORT"),
        ("localhost", "is not HOST:PORT"),
        ("localhost:", "is not HOST:PORT"),
        (":7702", "is not HOST:PORT"),
        ("localhost:0", "is not HOST:PORT"),
        ("localhost:65536", "is not HOST:PORT"),
        ("localhost:-1", "is not HOST:PORT"),
        ("localhost:٣", "is not HOST:PORT"),
        ("::1:7702", "is not HOST:PORT"),
        ("dns:///ledger", "is not HOST:PORT"),
        ("unix:", "is not HOST:PORT"),
        ("", "must not be empty"),
    ],
)
async def test_any_other_address_is_refused_by_every_client(address: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        connect(address)
    with pytest.raises(InvalidRequestError, match=message):
        connect("localhost:7702", address)
    with pytest.raises(InvalidRequestError, match=message):
        connect("localhost:7702", dedup=address)
    with pytest.raises(InvalidRequestError, match=message):
        connect("localhost:7702", cursor=address)


def test_the_client_for_threads_refuses_an_address_too() -> None:
    with pytest.raises(InvalidRequestError, match="leave out the scheme http://"):
        blocking.connect("http://localhost:7702")


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("failed to connect: Connection refused (111)", "connection refused: nothing listens"),
        ("Failed parsing HTTP/2 (Expected SETTINGS frame)", "the server there does not speak gRPC"),
        ("x (Trying to connect an http1.x server (HTTP status 400))", "the server there does not"),
        ("timed out before receiving SETTINGS frame", "the server there accepts connections, and"),
        ("DNS resolution failed for x", "the name of the host has no address"),
        ("Deadline Exceeded", "no answer in time"),
        ("another\n cause", "another cause"),
    ],
)
def test_the_cause_is_said_in_plain_words_before_those_of_grpc(said: str, cause: str) -> None:
    text = cause_of(UnavailableError(said))
    assert text.startswith(cause)
    assert " ".join(said.split()) in text


# ---- another service behind the address


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Client]:
    """A client whose addresses are all those of a server that is none of the services."""
    server = aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with connect(address, address, dedup=address, cursor=address) as client:
            yield client
    finally:
        await server.stop(None)


async def _produce(client: Client) -> None:
    async with client.producer("t"):
        pass


async def _consume(client: Client) -> None:
    async with client.consumer("t", "s"):
        pass


async def _read(client: Client) -> None:
    async with client.reader("t") as reader:
        await reader.read()


async def _look(client: Client) -> None:
    async with client.reader("t") as reader:
        await reader.has_message_available()


CALLS: dict[str, tuple[str, Callable[[Client], Awaitable[object]]]] = {
    "a producer": ("ledger", _produce),
    "a consumer": ("dispatcher", _consume),
    "a reader": ("ledger", _read),
    "a reader's look": ("ledger", _look),
    "a topic": ("ledger", lambda client: client.admin().topic("t")),
    "a policy": ("dedup", lambda client: client.admin().deduplication("t")),
    "a cursor": ("cursor", lambda client: client.admin().cursor("t", "c")),
    "a subscription": ("dispatcher", lambda client: client.admin().subscription("t", "s")),
    "a life": (
        "ledger",
        lambda client: client.admin().message_life("t", producer="p", sequence_id=1),
    ),
}


@pytest.mark.parametrize("call", CALLS)
async def test_every_call_names_the_service_that_is_not_at_its_address(
    client: Client, call: str
) -> None:
    service, calling = CALLS[call]
    with pytest.raises(WrongServiceError, match=f"is not the {service} service") as caught:
        await calling(client)
    assert caught.value.reason == "WRONG_SERVICE"
    assert caught.value.details["service"] == service
    assert caught.value.details["address"].startswith("127.0.0.1:")
