"""TLS in front of a PostgreSQL server, for the binaries that tests have are built without it: the
client's certificate must be the authority's, and its common name the role, as pg_hba's `cert`
demands."""

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.support.authority import Files

_SSL_REQUEST = struct.pack("!ii", 8, 80877103)


@asynccontextmanager
async def tls_for_postgres(port: int, files: Files, authority: Path) -> AsyncIterator[int]:
    """The port on which the server at `port` is reached over TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.certificate, files.key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            try:
                if await reader.readexactly(len(_SSL_REQUEST)) != _SSL_REQUEST:
                    return
                writer.write(b"S")
                await writer.drain()
                await writer.start_tls(context)
                await _relayed(reader, writer, port)
            finally:
                writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _relayed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    length = await reader.readexactly(4)
    startup = await reader.readexactly(int.from_bytes(length) - 4)
    words = startup[4:].split(b"\0")
    role = dict(zip(words[::2], words[1::2], strict=False))[b"user"].decode()
    subject = writer.get_extra_info("peercert")["subject"]
    if (("commonName", role),) not in subject:
        return
    backward, forward = await asyncio.open_connection("127.0.0.1", port)
    try:
        forward.write(length + startup)
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
