"""`seqgate context`: shows the services that commands call, and chooses them."""

import os
from pathlib import Path
from typing import Annotated

from seqgate.cli._command import Run, command, group
from seqgate.cli._config_file import add_context, remove_context, use_context
from seqgate.cli._declared import argument
from seqgate.cli._failure import WrongUsage
from seqgate.cli._output import Columns, Table, table
from seqgate.cli._settings import FILES, SERVICES, Setting

app = group("Show and choose the services that commands call.")

Name = Annotated[str, argument("NAME", "The context.", when_empty=None)]


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


@command(app, "add")
async def add(run: Run, name: Name) -> None:
    """Add a context to the config file: the addresses and files that are given as options.

    The first context becomes the current one. A token itself is never written; give --token-file.
    """
    settings = run.settings
    given = {
        **{service: getattr(settings, service) for service in SERVICES},
        **settings.files,
    }
    values = {key: each.value for key, each in given.items() if each.source.startswith("--")}
    if not values:
        raise WrongUsage("give the addresses of the context: --ledger HOST:PORT, --dispatcher ...")
    folder = Path.cwd()
    for key in FILES:
        if key in values:
            values[key] = str(folder / values[key])
    add_context(settings.config, name, values)
    shown = {"context": name, "current": settings.config.current is None, **values}
    run.output.result(shown, [("Context", name), *values.items()])


@command(app, "use")
async def use(run: Run, name: Name) -> None:
    """Make a context the current one."""
    use_context(run.settings.config, name)
    run.output.result({"context": name, "current": True}, [("Current context", name)])


@command(app, "rm")
async def rm(run: Run, name: Name) -> None:
    """Remove a context from the config file."""
    remove_context(run.settings.config, name)
    run.output.result({"context": name, "removed": True})


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
