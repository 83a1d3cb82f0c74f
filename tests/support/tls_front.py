"""TLS in front of PostgreSQL and Valkey: the binaries that tests have are built without it."""

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.support.authority import Files
from tools.stack.forwarder import close_listeners

_SSL_REQUEST = struct.pack("!ii", 8, 80877103)

_Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def tls_for_valkey(port: int, files: Files) -> AsyncIterator[int]:
    """The port on which the server at `port` is reached over TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)

    async def relayed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _relayed(reader, writer, port)

    async with _served(relayed, context) as front:
        yield front


@asynccontextmanager
async def tls_for_postgres(port: int, files: Files, authority: Path) -> AsyncIterator[int]:
    """The port on which the server at `port` is reached over TLS. The client's certificate must be
    the authority's, and its common name the role, as pg_hba's `cert` demands."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.certificate, files.key)

    async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readexactly(len(_SSL_REQUEST)) != _SSL_REQUEST:
            return
        writer.write(b"S")
        await writer.drain()
        await writer.start_tls(context)
        length = await reader.readexactly(4)
        startup = await reader.readexactly(int.from_bytes(length) - 4)
        words = startup[4:].split(b"\0")
        role = dict(zip(words[::2], words[1::2], strict=False))[b"user"].decode()
        if (("commonName", role),) in writer.get_extra_info("peercert")["subject"]:
            await _relayed(reader, writer, port, length + startup)

    async with _served(asked, None) as front:
        yield front


@asynccontextmanager
async def _served(serve: _Serve, context: ssl.SSLContext | None) -> AsyncIterator[int]:
    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            try:
                await serve(reader, writer)
            finally:
                writer.close()

    server = await asyncio.start_server(served, "127.0.0.1", ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        await close_listeners(server)


async def _relayed(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, first: bytes = b""
) -> None:
    backward, forward = await asyncio.open_connection("127.0.0.1", port)
    try:
        forward.write(first)
        await asyncio.wait(
            [
                asyncio.create_task(_copy(reader, forward)),
                asyncio.create_task(_copy(backward, writer)),
            ],
            return_when=asyncio.FIRST_COMPLETED,
        )
    finally:
        forward.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()
