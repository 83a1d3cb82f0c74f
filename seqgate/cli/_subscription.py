"""`seqgate subscription`: creates, changes and deletes subscriptions."""

from functools import partial
from typing import Any, Final

from seqgate.api.common.v1 import common_pb2
from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.cli._arguments import (
    PLACE_HELP,
    Subscription,
    Topic,
    key_from_base64,
    key_from_text,
    place,
    properties_of,
    start,
)
from seqgate.cli._command import Run, command, group
from seqgate.cli._confirm import Yes, confirm
from seqgate.cli._declared import REQUIRED, argument, flag, option
from seqgate.cli._failure import WrongUsage
from seqgate.cli._known import known
from seqgate.cli._losses import of_progress
from seqgate.cli._output import Columns, time_shown
from seqgate.cli._redrive import replay
from seqgate.cli._report import explain, report
from seqgate.cli._skipped import DryRun, confirm_move, move_to, tell_move
from seqgate.cli._subscription_filter import analyze
from seqgate.cli._subscription_filter import app as filter_
from seqgate.cli._wire import bytes_record, record
from seqgate.client._subscribing import Place, start_to_wire

LISTED: Final = 1_000

app = group("Manage subscriptions, and explain why messages are not delivered.")
app.add_typer(filter_, name="filter")
command(app, "analyze")(analyze)


@command(app, "ls")
async def ls(run: Run, topic: Topic) -> None:
    """List a topic's subscriptions, sorted by name."""
    columns: Columns = {
        "SUBSCRIPTION": "subscription",
        "MARK-DELETE": "mark_delete",
        "BEYOND": "acknowledged_entries",
        "PROPERTIES": lambda each: len(each["properties"]),
        "OWNER": "owner",
    }
    found = run.services.pages(pb.ListSubscriptionsRequest(topic=topic, page_size=LISTED))
    subscriptions = (record(each) async for each in known(run, topic, found))
    await run.output.listing(columns, subscriptions)


@command(app, "show")
async def show(run: Run, topic: Topic, name: Subscription) -> None:
    """Show a subscription: its position, its properties and its owner."""
    await _tell(run, pb.GetSubscriptionRequest(topic=topic, subscription=name))


@command(app, "create")
async def create(
    run: Run,
    topic: Topic,
    name: Subscription,
    *,
    start_at: common_pb2.Start = option(
        "PLACE", PLACE_HELP, "--from", default="earliest", parse=partial(start, "--from")
    ),
    properties: dict[str, str] | None = option(
        "NAME=VALUE",
        "A property; repeatable.",
        "--property",
        parse=partial(properties_of, "--property"),
        raw=list[str],
    ),
) -> None:
    """Create a subscription. An existing one is left unchanged.

    For a message in a batch, delivery starts with the whole batch; for a large message, with its
    first chunk. A time means the first message stored at or after it, by the ledger's clock.
    """
    request = pb.CreateSubscriptionRequest(
        topic=topic, subscription=name, start=start_at, properties=properties
    )
    await _tell(run, request)


@command(app, "rm")
async def rm(
    run: Run,
    topic: Topic,
    name: Subscription,
    *,
    force: bool = flag("Delete it even with connected consumers, and disconnect them."),
    yes: Yes = False,
) -> None:
    """Delete a subscription and its acknowledgements.

    Counts what is lost, and asks first; without a terminal, --yes is required.
    """
    found = await run.services.call(pb.GetSubscriptionRequest(topic=topic, subscription=name))
    await confirm(await of_progress(run, "Subscription", found.subscription), yes=yes)
    await run.services.call(
        pb.DeleteSubscriptionRequest(topic=topic, subscription=name, force=force)
    )
    run.output.result({"topic": topic, "subscription": name, "removed": True})


@command(app, "reset")
async def reset(
    run: Run,
    topic: Topic,
    name: Subscription,
    *,
    to: Place = option("PLACE", PLACE_HELP, default=REQUIRED, parse=partial(place, "--to")),
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Move a subscription forwards or backwards. Acknowledgements beyond the place are discarded.

    A move that skips unacknowledged entries is asked for first, with their number. Consumers stay
    connected; their deliveries in flight become stale. For a message in a batch, delivery starts
    with the whole batch; for a large message, with its first chunk.
    """
    names = {"topic": topic, "subscription": name}
    move = await move_to(run, pb.GetSubscriptionRequest(**names), topic, name, to)
    if dry_run:
        tell_move(run, names, move)
        return
    await confirm_move(topic, name, move, yes=yes)
    await _tell(run, pb.ResetSubscriptionRequest(start=start_to_wire(to), **names))


@command(app, "set")
async def set_(
    run: Run,
    topic: Topic,
    name: Subscription,
    *,
    put: dict[str, str] | None = option(
        "NAME=VALUE",
        "Set a property; repeatable.",
        parse=partial(properties_of, "--put"),
        raw=list[str],
    ),
    remove: list[str] | None = option("NAME", "Remove a property; repeatable."),
) -> None:
    """Change a subscription's properties. Removing one that is not set is not an error."""
    if not put and not remove:
        raise WrongUsage("give --put or --remove")
    request = pb.UpdateSubscriptionPropertiesRequest(
        topic=topic, subscription=name, put=put, remove=remove
    )
    await _tell(run, request)


command(app, "replay")(replay)
command(app, "report")(report)
command(app, "explain")(explain)


@command(app, "release-key")
async def release_key(
    run: Run,
    topic: Topic,
    name: Subscription,
    key: str = argument("KEY", "The key.", is_bytes=True),
    *,
    is_base64: bool = flag("KEY is base64, not text.", "--base64"),
) -> None:
    """Resume delivery of a key after a dead letter: one that is held, or whose later messages go to
    the dead letter topic."""
    held = key_from_base64("KEY", key) if is_base64 else key_from_text(key)
    await run.services.call(pb.ReleaseKeyRequest(topic=topic, subscription=name, key=held))
    released = {**bytes_record("key", held), "released": True}
    run.output.result({"topic": topic, "subscription": name, **released})


async def _tell(run: Run, request: Any) -> None:
    """Send a request that returns a subscription, and show it."""
    answer = await run.services.call(request)
    shown = record(answer.subscription)
    fields: list[tuple[str, object]] = [
        ("Topic", shown["topic"]),
        ("Subscription", shown["subscription"]),
        ("Since", time_shown(shown["created_ms"])),
        ("Mark-delete position", shown["mark_delete"]),
        ("Entries acknowledged beyond", shown["acknowledged_entries"]),
        ("Properties", len(shown["properties"])),
        *[("  property", f"{name} = {value}") for name, value in shown["properties"].items()],
        ("Owner", shown["owner"]),
    ]
    if isinstance(request, pb.CreateSubscriptionRequest):
        shown["created"] = answer.created
        fields.append(("Created", "now" if answer.created else "before; left unchanged"))
    run.output.result(shown, fields)
