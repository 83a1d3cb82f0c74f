"""`seqgate context`: which services a command talks to, and who says so."""

import os
from typing import Final

from seqgate.cli._command import Run, command, group
from seqgate.cli._failure import DONE
from seqgate.cli._output import Columns
from seqgate.cli._settings import Setting

SERVICES: Final = ("ledger", "dedup", "cursor", "dispatcher", "filter")

app = group("Which services a command talks to.")


@command(app, "ls")
async def ls(run: Run) -> int:
    """List the contexts of the config file, with the current one marked."""
    config, chosen = run.settings.config, run.settings.context
    current = None if chosen is None else chosen.value
    contexts = [
        {"context": name, "current": name == current}
        | {service: getattr(context, service) for service in SERVICES}
        for name, context in sorted(config.contexts.items())
    ]
    if run.output.json:
        for each in contexts:
            run.output.record(each)
        return DONE
    columns: Columns = {
        "CURRENT": lambda each: "*" if each["current"] else "",
        "CONTEXT": "context",
        **{service.upper(): service for service in SERVICES},
    }
    run.output.rows(columns, contexts)
    return DONE


@command(app, "show")
async def show(run: Run) -> int:
    """Show the effective settings and the source of each."""
    settings = run.settings
    exists = settings.config.path.exists()
    values = {
        "context": settings.context,
        **{service: getattr(settings, service) for service in SERVICES},
        **{name: each for name, each in settings.files.items() if each is not None},
    }
    if run.output.json:
        run.output.record(
            {
                "config": str(settings.config.path),
                "config_exists": exists,
                **{key: None if each is None else each._asdict() for key, each in values.items()},
            }
        )
        return DONE
    where = Setting(
        str(settings.config.path) + ("" if exists else " (does not exist)"),
        "SEQGATE_CONFIG" if os.environ.get("SEQGATE_CONFIG") else "default",
    )
    run.output.table(
        ("SETTING", "VALUE", "SET BY"),
        [(name, *(each or (None, None))) for name, each in {"config": where, **values}.items()],
    )
    return DONE
