"""`seqgate context`: shows the services that commands call, and the sources of their addresses."""

import os

from seqgate.cli._command import Run, command, group
from seqgate.cli._output import Columns, Table, table
from seqgate.cli._settings import SERVICES, Setting

app = group("Show the services that commands call.")


@command(app, "ls")
async def ls(run: Run) -> None:
    """List the contexts of the config file, with the current one marked."""
    config, chosen = run.settings.config, run.settings.context
    current = None if chosen is None else chosen.value
    contexts = [
        {"context": name, "current": name == current}
        | {service: context.get(service) for service in SERVICES}
        for name, context in sorted(config.contexts.items())
    ]
    if run.output.json:
        for each in contexts:
            run.output.record(each)
        return
    columns: Columns = {
        "CURRENT": lambda each: "*" if each["current"] else "",
        "CONTEXT": "context",
        **{service.upper(): service for service in SERVICES},
    }
    run.output.table(*table(columns, contexts))


@command(app, "show")
async def show(run: Run) -> None:
    """Show the effective settings and the source of each."""
    settings = run.settings
    exists = settings.config.path.exists()
    values = {
        "context": settings.context,
        **{service: getattr(settings, service) for service in SERVICES},
        **settings.files,
    }
    shown = {
        "config": str(settings.config.path),
        "config_exists": exists,
        **{key: None if each is None else each._asdict() for key, each in values.items()},
    }
    where = Setting(
        str(settings.config.path) + ("" if exists else " (does not exist)"),
        "SEQGATE_CONFIG" if os.environ.get("SEQGATE_CONFIG") else "default",
    )
    rows = [(name, *(each or (None, None))) for name, each in {"config": where, **values}.items()]
    run.output.result(shown, Table(("SETTING", "VALUE", "SET BY"), rows))
