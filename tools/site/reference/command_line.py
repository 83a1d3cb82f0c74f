"""The page of the command line, by walking its commands."""

from collections.abc import Iterator
from typing import Any, Final

import typer

from seqgate.cli import _command, _main
from tools.site.reference.tables import escaped, table

HEAD: Final = """\
# Command line

In a checkout, `pip install '.[cli]'` installs `seqgate`. Options may stand before or after a
command; the last one wins. With `--output json`, a command prints one JSON object per line.
"""


def page() -> str:
    root: Any = typer.main.get_command(_main.app)
    parts = [HEAD, "## Options of every command\n", _options(_shared_of(root))]
    for path, command in commands(root, "seqgate"):
        level = "##" if _is_group(command) or path.count(" ") == 1 else "###"
        parts.append(f"{level} {path}\n\n{_text(command)}\n")
        if not _is_group(command):
            context = typer.Context(command, info_name=path)
            parts.append(f"```text\n{_usage(command, context)}\n```\n")
            parts.append(_parameters(command))
    return "\n".join(parts)


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every group and command below a group, with its name."""
    groups = [each for each in command.commands.items() if _is_group(each[1])]
    single = [each for each in command.commands.items() if not _is_group(each[1])]
    for name, each in (*single, *groups):
        if not each.hidden:
            yield f"{path} {name}", each
            if _is_group(each):
                yield from commands(each, f"{path} {name}")


def _is_group(command: Any) -> bool:
    return hasattr(command, "commands")


def _text(command: Any) -> str:
    paragraphs = (command.help or "").replace("\f", "").split("\n\n")
    return "\n\n".join(map(_paragraph, paragraphs))


def _paragraph(text: str) -> str:
    line = " ".join(text.split())
    return f"```json\n{line}\n```" if line.startswith("{") else escaped(line)


def _usage(command: Any, context: Any) -> str:
    return " ".join(str(command.get_usage(context)).removeprefix("Usage:").split())


def _shared_of(root: Any) -> list[Any]:
    names = {each.name for each in _command.SHARED}
    return [each for each in root.params if each.name in names]


def _parameters(command: Any) -> str:
    shared = {each.name for each in _command.SHARED} | {"help"}
    own = [each for each in command.params if each.name not in shared and not each.hidden]
    arguments = [each for each in own if each.param_type_name == "argument"]
    rows = [(f"`{_metavar(each)}`", _help(each)) for each in arguments]
    parts = [table(("argument", "meaning"), rows)] if rows else []
    options = [each for each in own if each.param_type_name == "option"]
    return "\n".join([*parts, *([_options(options)] if options else [])])


def _options(options: list[Any]) -> str:
    rows = []
    for each in options:
        flags = ", ".join(f"`{flag}`" for flag in (*each.opts, *each.secondary_opts))
        metavar = "" if each.is_flag else f" `{_metavar(each)}`"
        rows.append((flags + metavar, _help(each)))
    return table(("option", "meaning"), rows)


def _metavar(parameter: Any) -> str:
    kind = parameter.type_descriptor
    if parameter.metavar or not kind.is_choice:
        return str(parameter.metavar or kind.annotation.__name__.upper())
    return " or ".join(str(getattr(each, "value", each)) for each in kind.choices)


def _help(parameter: Any) -> str:
    text = escaped(parameter.help or "")
    notes = []
    if parameter.required and parameter.param_type_name == "option":
        notes.append("Required.")
    if parameter.multiple and "Repeatable" not in text:
        notes.append("May be repeated.")
    if parameter.default not in (None, False, (), "") and parameter.show_default:
        default = getattr(parameter.default, "value", parameter.default)
        notes.append(f"Default: `{default}`.")
    return " ".join([text, *notes])
