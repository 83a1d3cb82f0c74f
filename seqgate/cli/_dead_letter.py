"""`seqgate dead-letter`: shows a subscription's dead letters, mends, discards and redrives them."""

import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.cli._arguments import (
    Subscription,
    Topic,
    key_from_base64,
    key_from_text,
    message_id,
    properties_of,
    topic_name,
)
from seqgate.cli._command import Run, command, group
from seqgate.cli._confirm import Yes, confirm
from seqgate.cli._declared import argument, flag, option
from seqgate.cli._failure import WrongUsage
from seqgate.cli._lines import STANDARD_STREAM, open_input, whole
from seqgate.cli._losses import counted
from seqgate.cli._message import record as message_record
from seqgate.cli._output import Columns, shown, time_shown, words
from seqgate.cli._redrive import (
    DryRun,
    Expression,
    IsBase64,
    KeyOption,
    Rate,
    RequestId,
    Wait,
    selected,
    start_or_estimate,
)
from seqgate.cli._wire import record, wire_position
from seqgate.client import MessageId
from seqgate.client._codec import decode_entry

WHY_SHOWN: Final = 60
"""How many characters of a reason a list shows; `show` shows all."""

LISTED: Final = 1_000

Where = Annotated[
    str,
    option(
        "TOPIC",
        "The dead letter topic to look in. By default, the one that the subscription uses.",
        "--in",
        default="",
        parse=lambda text: text and topic_name(text),
    ),
]
Letter = Annotated[
    MessageId,
    argument(
        "LETTER", "The letter's id in the dead letter topic.", parse=partial(message_id, "LETTER")
    ),
]

MendId = Annotated[
    str | None,
    option("ID", "Makes the command safe to repeat: it takes effect once for each id.", "--id"),
]

app = group(
    "Show the messages that a subscription dead-lettered, and why; mend them; take them back."
)


@command(app, "ls")
async def ls(
    run: Run,
    topic: Topic,
    name: Subscription,
    *,
    key: str | None = option("KEY", "Only the letters of this key.", "--key", "-k", is_bytes=True),
    is_base64: bool = flag("KEY is base64, not text.", "--base64"),
    where: Where,
) -> None:
    """List a subscription's dead letters, the oldest first."""
    columns: Columns = {
        "LETTER": "position",
        "MESSAGE": "origin",
        "KEY": _key_shown,
        "DEAD SINCE": "time_ms",
        "REASON": "reason",
        "ATTEMPTS": "attempts",
        "WHY": _why_shown,
        "WAITING": _waiting_shown,
        "STATE": lambda each: words(each["state"]),
    }
    wanted = None
    if key is not None:
        wanted = key_from_base64("--key", key) if is_base64 else key_from_text(key)
    request = pb.ListDeadLettersRequest(
        topic=topic, subscription=name, key=wanted, dead_letter_topic=where, page_size=LISTED
    )
    found = run.services.pages(request)
    await run.output.listing(columns, (record(each) async for each in found))


@command(app, "show")
async def show(run: Run, topic: Topic, name: Subscription, letter: Letter, *, where: Where) -> None:
    """Show a dead letter: why it is one, its failed deliveries, what waits behind it, and its
    messages."""
    answer = await run.services.call(
        pb.GetDeadLetterRequest(
            topic=topic,
            subscription=name,
            position=wire_position(letter.position),
            dead_letter_topic=where,
        )
    )
    found = record(answer.letter)
    found["dead_letter_topic"] = answer.dead_letter_topic
    is_chunk = answer.letter.HasField("chunk_id")
    messages = [] if is_chunk else decode_entry(answer.dead_letter_topic, answer.entry)
    found["messages"] = [message_record(each) for each in messages]
    fields: list[tuple[str, object]] = [
        ("Letter", found["position"]),
        ("Dead letter topic", found["dead_letter_topic"]),
        ("Message", found["origin"]),
        ("Key", _key_shown(found)),
        ("Producer", found["producer_name"]),
        ("Sequence id", found["sequence_id"]),
        ("Dead since", time_shown(found["time_ms"])),
        ("Reason", found["reason"]),
        ("State", words(found["state"])),
        ("Mended as", found["successor"]),
        ("Mend of", found["mend"] and _mend_shown(found["mend"])),
        ("Redrives before", found["redrives"]),
        ("Failed deliveries", found["attempts"]),
        *[("  failure", _failure_shown(each)) for each in found["failures"]],
        *[line for each in found["lives"] for line in _life_shown(each)],
        ("Holds its key", "yes" if found["holds_key"] else "no"),
        ("Waiting behind it", _waiting_shown(found)),
        *[("  property", f"{each} = {value}") for each, value in found["properties"].items()],
        ("Payload bytes", found["payload_bytes"]),
        *[("Payload", repr(each.payload)[2:-1]) for each in messages],
    ]
    run.output.result(found, fields)


@command(app, "redrive")
async def redrive(
    run: Run,
    topic: Topic,
    name: Subscription,
    letters: list[MessageId] | None = argument(
        "LETTER",
        "The letters' ids in the dead letter topic: up to 100, all of which are redriven, or none.",
        default=None,
        parse=lambda given: [message_id("LETTER", each) for each in given or ()],
        raw=list[str],
    ),
    *,
    all_: bool = flag("Redrive all letters.", "--all"),
    key: KeyOption = None,
    is_base64: IsBase64 = False,
    expression: Expression = None,
    rate: Rate = 0,
    request_id: RequestId = None,
    dry_run: DryRun = False,
    wait: Wait = False,
    where: Where,
) -> None:
    """Take dead letters back to their subscription: letters named one by one, those selected by
    --key and --where, or all.

    Each message is delivered and acknowledged once more, under the rules of its key: if the key is
    held behind it, it comes first, and its acknowledgement resumes the key.

    A redrive of many survives this command, and redrives each letter once. `seqgate redrive` shows
    and stops it.
    """
    is_selected = all_ or key is not None or expression is not None
    if bool(letters) == is_selected:
        raise WrongUsage("give letters, or --all, --key or --where")
    if letters:
        if rate or wait or is_base64:
            raise WrongUsage("--rate, --wait and --base64 require --all, --key or --where")
        await _redrive_named(run, topic, name, letters, request_id, where, dry_run=dry_run)
        return
    request = pb.StartRedriveRequest(
        topic=topic,
        subscription=name,
        dead_letter_topic=where,
        selection=selected(key, expression, is_base64=is_base64),
    )
    await start_or_estimate(run, request, rate, request_id, dry_run=dry_run, wait=wait)


async def _redrive_named(
    run: Run,
    topic: str,
    name: str,
    letters: Sequence[MessageId],
    request_id: str | None,
    where: str,
    *,
    dry_run: bool,
) -> None:
    made = await run.services.call(
        pb.RedriveDeadLettersRequest(
            topic=topic,
            subscription=name,
            positions=[wire_position(each.position) for each in letters],
            request_id=request_id or uuid.uuid4().hex,
            dry_run=dry_run,
            dead_letter_topic=where,
        )
    )
    run.output.result({"topic": topic, "subscription": name, **record(made)})


@command(app, "mend")
async def mend(
    run: Run,
    topic: Topic,
    name: Subscription,
    letter: Letter,
    *,
    payload: str | None = option(
        "TEXT",
        "The new payload; - reads standard input.",
        "--payload",
        when_empty="for an empty payload, give --empty instead",
        is_bytes=True,
    ),
    file: Path | None = option(
        "FILE", "A file with the new payload, of any bytes; - is standard input.", "--file"
    ),
    empty: bool = flag("The new payload is empty."),
    put: dict[str, str] | None = option(
        "NAME=VALUE",
        "Set a property of the message; repeatable.",
        parse=partial(properties_of, "--put"),
        raw=list[str],
    ),
    remove: list[str] | None = option("NAME", "Remove a property of the message; repeatable."),
    request_id: MendId = None,
    where: Where,
) -> None:
    """Publish a changed copy of a dead letter beside it, and print the copy's id.

    The copy takes the letter's place: redrive it like any other. Its key cannot be changed. Takes
    the right to publish to the dead letter topic.
    """
    if [payload is not None, file is not None, empty].count(True) > 1:
        raise WrongUsage("--payload, --file and --empty exclude each other")
    path = STANDARD_STREAM if payload == STANDARD_STREAM else file and str(file)
    content = (
        b"" if empty else None if payload is None else payload.encode(errors="surrogateescape")
    )
    if path is not None:
        with open_input(str(path)) as opened:
            pieces = run.waits.each(f"input from {path}", whole(opened.fileno()))
            (content,) = [data async for _, data in pieces]
    if content is None and not put and not remove:
        raise WrongUsage("give --payload, --file, --empty, --put or --remove")
    if not where:
        listing = pb.ListDeadLettersRequest(topic=topic, subscription=name, page_size=1)
        where = (await run.services.call(listing)).dead_letter_topic
    made = await run.services.call(
        pb.MendDeadLetterRequest(
            topic=topic,
            subscription=name,
            dead_letter_topic=where,
            position=wire_position(letter.position),
            payload=content,
            put=put,
            remove=remove,
            request_id=request_id or uuid.uuid4().hex,
        )
    )
    run.output.result({"topic": topic, "subscription": name, **record(made)})


@command(app, "discard")
async def discard(
    run: Run,
    topic: Topic,
    name: Subscription,
    letters: list[MessageId] = argument(
        "LETTER",
        "The letters' ids in the dead letter topic: up to 100. All are discarded, or none.",
        parse=lambda given: [message_id("LETTER", each) for each in given],
        raw=list[str],
    ),
    *,
    reason: str = option("TEXT", "Why, for the record.", "--reason", default=""),
    request_id: MendId = None,
    where: Where,
    yes: Yes = False,
) -> None:
    """Give dead letters up: they stay in the dead letter topic, and are never redriven.

    A key that is held behind one of them resumes with the message after it. Asks first; without a
    terminal, --yes is required.
    """
    dead = counted(len(letters), "dead letter", "dead letters")
    await confirm(f"{dead} of {name} of {topic} will never be redriven.", yes=yes)
    made = await run.services.call(
        pb.DiscardDeadLettersRequest(
            topic=topic,
            subscription=name,
            positions=[wire_position(each.position) for each in letters],
            reason=reason,
            request_id=request_id or uuid.uuid4().hex,
            dead_letter_topic=where,
        )
    )
    run.output.result({"topic": topic, "subscription": name, **record(made)})


@command(app, "log")
async def log(run: Run, topic: Topic, name: Subscription) -> None:
    """List the latest redrives, mends and discards of a subscription's dead letters: who, when,
    what. The latest comes first."""
    columns: Columns = {
        "OPERATION": "number",
        "ACTION": lambda each: words(each["action"]),
        "AT": lambda each: time_shown(each["time_ms"]),
        "BY": "caller",
        "LETTERS": "letters",
        "FIRST": lambda each: each["positions"][0] if each["positions"] else None,
        "MENDED AS": "successor",
        "WHY": "reason",
    }
    answer = await run.services.call(pb.ListLetterOperationsRequest(topic=topic, subscription=name))

    async def listed() -> AsyncIterator[dict[str, Any]]:
        for each in answer.operations:
            yield record(each)

    await run.output.listing(columns, listed())


def _key_shown(letter: dict[str, Any]) -> object:
    return letter["key"] if "key" in letter else letter["key_base64"]


def _why_shown(letter: dict[str, Any]) -> str | None:
    """Why its last delivery was refused, if the consumer said so."""
    why = str(letter["failures"][-1]["reason"]) if letter["failures"] else ""
    return why if len(why) <= WHY_SHOWN else f"{why[: WHY_SHOWN - 1]}…"


def _waiting_shown(letter: dict[str, Any]) -> object:
    """How many entries wait behind a letter that holds its key; `+`: and more in the log."""
    if not letter["holds_key"]:
        return None
    return f"{letter['waiting_entries']}{'+' if letter['lags'] else ''}"


def _mend_shown(mend: dict[str, Any]) -> str:
    return f"{mend['original']} at {time_shown(mend['time_ms'])} by {shown(mend['caller'])}"


def _life_shown(life: dict[str, Any]) -> list[tuple[str, object]]:
    failures = [("  failure", _failure_shown(each)) for each in life["failures"]]
    return [("Earlier life", f"letter {life['letter']}, {words(life['reason'])}"), *failures]


def _failure_shown(failure: dict[str, Any]) -> str:
    at, consumer = time_shown(failure["time_ms"]), shown(failure["consumer"])
    why = f": {shown(failure['reason'])}" if failure["reason"] else ""
    return f"{failure['failure']} at {at} by {consumer}{why}"
