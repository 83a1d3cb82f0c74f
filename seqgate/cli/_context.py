"""`seqgate context`: which services a command talks to, and who says so."""

import os

from seqgate.cli._command import Run, command, group
from seqgate.cli._failure import DONE
from seqgate.cli._settings import Setting

app = group("Which services a command talks to.")


@command(app, "ls")
async def ls(run: Run) -> int:
    """List the contexts of the config file; the one in effect is marked."""
    config, chosen = run.settings.config, run.settings.context
    current = None if chosen is None else chosen.value
    if run.output.json:
        for name, context in sorted(config.contexts.items()):
            run.output.record(
                {
                    "context": name,
                    "current": name == current,
                    "ledger": context.ledger,
                    "dedup": context.dedup,
                    "cursor": context.cursor,
                    "dispatcher": context.dispatcher,
                    "filter": context.filter,
                }
            )
        return DONE
    run.output.table(
        ("CURRENT", "CONTEXT", "LEDGER", "DEDUP", "CURSOR", "DISPATCHER", "FILTER"),
        [
            (
                "*" if name == current else "",
                name,
                context.ledger,
                context.dedup,
                context.cursor,
                context.dispatcher,
                context.filter,
            )
            for name, context in sorted(config.contexts.items())
        ],
    )
    return DONE


@command(app, "show")
async def show(run: Run) -> int:
    """Show the settings in effect, and where each comes from."""
    settings = run.settings
    exists = settings.config.path.exists()
    values = {
        "context": settings.context,
        "ledger": settings.ledger,
        "dedup": settings.dedup,
        "cursor": settings.cursor,
        "dispatcher": settings.dispatcher,
        "filter": settings.filter,
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
