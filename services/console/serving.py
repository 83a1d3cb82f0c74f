"""The HTTP server, whose certificate may be renewed while it serves."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import structlog
import uvicorn
from starlette.types import ASGIApp

from seqgate.services.console.config import ConsoleConfig
from seqgate.services.runtime.tasks import end
from seqgate.tls import key_pair
from seqgate.watched import Watched

log = structlog.get_logger()

SHUTDOWN_S: Final = 10
"""How long requests under way may take after SIGTERM, in seconds."""

CERTIFICATE_CHECK_S: Final = 10.0
"""The interval at which a changed certificate is noticed, in seconds."""


@asynccontextmanager
async def serving(config: ConsoleConfig, app: ASGIApp) -> AsyncIterator[None]:
    """Serve HTTP while the context lasts; then requests under way have SHUTDOWN_S to end."""
    host, _, port = config.listen.rpartition(":")
    settings = uvicorn.Config(
        app,
        host=host.strip("[]"),
        port=int(port),
        ssl_certfile=config.tls_certificate_file,
        ssl_keyfile=config.tls_key_file,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,  # its lines have queries, which are keys and expressions
        server_header=False,
        proxy_headers=False,
        limit_concurrency=config.requests_max,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    settings.load()
    server = uvicorn.Server(settings)  # its serve() would end the process by the signal
    server.lifespan = settings.lifespan_class(settings)
    await server.startup()
    task = asyncio.create_task(server.main_loop())
    renewing = asyncio.create_task(_renewed(config, settings.ssl))
    log.info("serving", listen=config.listen, credentials=config.credentials)
    try:
        yield
    finally:
        await end(renewing)
        server.should_exit = True
        await task
        await server.shutdown()


async def _renewed(config: ConsoleConfig, context: ssl.SSLContext | None) -> None:
    """Use a changed certificate for new connections."""
    certificate, key = config.tls_certificate_file, config.tls_key_file
    if context is None or certificate is None or key is None:
        return
    watched = Watched([certificate, key], lambda: key_pair(certificate, key), lambda _: None)
    used = watched.get()
    while True:
        await asyncio.sleep(CERTIFICATE_CHECK_S)
        if watched.get() is not used:
            used = watched.get()
            context.load_cert_chain(certificate, key)
            log.info("certificate loaded", file=str(certificate))
