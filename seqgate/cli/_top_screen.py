"""The layout of a frame of `seqgate top`: a summary, and a row per topic and subscription."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from seqgate.cli._output import shown, time_shown
from seqgate.client._frames import VERDICTS

if TYPE_CHECKING:
    from rich.console import ConsoleDimensions, RenderableType

HEADINGS: Final = (
    *("TOPIC", "SUBSCRIPTION", "IN/S", "OUT/S"),
    *(name.upper() for name in VERDICTS),
    *("LAG", "UNACKED", "BLOCKED", "WHY"),
)

TEXT_COLUMNS: Final = frozenset({"TOPIC", "SUBSCRIPTION", "WHY"})

AROUND: Final = 3
"""The lines besides rows and the summary."""

KEYS: Final = "q: quit   s: change the sort order"


def summary(frame: Mapping[str, Any]) -> list[str]:
    topics = frame["topics"]
    came = _sum(topics, "in_messages_s")
    went = _sum(topics, "out_messages_s")
    lines = [
        f"{time_shown(frame['time_ms'])}   {len(topics)} topics   in {came}/s   out {went}/s   "
        f"blocked keys {_sum(topics, 'blocked_keys')}"
    ]
    if frame["topics_left_out"]:
        lines.append(f"{frame['topics_left_out']} more topics match and are not shown")
    for service, error in frame["away"].items():
        reason = f" ({error['reason']})" if error["reason"] else ""
        lines.append(f"{service} is unreachable: {shown(error['message'])}{reason}")
    return lines


def rows_of(frame: Mapping[str, Any]) -> tuple[Sequence[str], list[list[object]]]:
    """Headings, and rows: one for each topic, followed by those of its subscriptions."""
    rows: list[list[object]] = []
    for topic in frame["topics"]:
        verdicts = topic["verdicts_s"] or {}
        rows.append(
            [
                *(topic["topic"], "", topic["in_messages_s"], topic["out_messages_s"]),
                *(verdicts.get(name) for name in VERDICTS),
                *(topic["lag"], None, topic["blocked_keys"], _state(topic)),
            ]
        )
        rows += map(_subscription_row, topic["subscriptions"] or ())
        if topic["subscriptions_left_out"]:
            more = f"{topic['subscriptions_left_out']} more"
            rows.append(["", more, *(None for _ in HEADINGS[2:])])
    return HEADINGS, rows


def _subscription_row(record: Mapping[str, Any]) -> list[object]:
    return [
        *("", record["subscription"], None, record["out_messages_s"]),
        *(None for _ in VERDICTS),
        *(record["lag"], record["unacked_messages"], record["blocked_keys"], _why(record)),
    ]


def screen(frame: Mapping[str, Any], sort: str, size: "ConsoleDimensions") -> "RenderableType":
    """The frame for a terminal of this size; rows without room are counted."""
    from rich.console import Group  # slow to import, and useless to scripts
    from rich.table import Table
    from rich.text import Text

    about = summary(frame)
    headings, rows = rows_of(frame)
    room = max(0, size.height - len(about) - AROUND)
    table = Table(box=None, pad_edge=False, expand=True, header_style="bold")
    for heading in headings:
        justify: Any = "left" if heading in TEXT_COLUMNS else "right"
        table.add_column(heading, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in rows[:room]:
        table.add_row(*(Text("" if cell is None else shown(cell)) for cell in row))
    hidden = len(rows) - room
    below = f"{KEYS}   sorted by {sort}" + (f"   {hidden} more rows" if hidden > 0 else "")
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in about]
    return Group(*lines, Text(""), table, Text(below, style="dim", no_wrap=True))


def _state(topic: Mapping[str, Any]) -> str:
    """The state of deduplication, unless it is the usual one."""
    state = topic["state"]
    if state == "RECOVERING":
        return f"recovering, {topic['entries_to_replay']} entries to replay"
    return "not deduplicated" if state == "DISABLED" else ""


def _why(subscription: Mapping[str, Any]) -> str:
    if subscription["owner"] is None:
        return "no owner"
    blocked = subscription["blocked"] or ()
    return ", ".join(
        f"{each['reason'].lower().replace('_', ' ')} {each['keys']}" for each in blocked
    )


def _sum(records: Sequence[Mapping[str, Any]], name: str) -> str:
    known = [each[name] for each in records if each[name] is not None]
    return f"{sum(known):g}" if known else "-"
