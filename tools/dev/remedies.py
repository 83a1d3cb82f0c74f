"""What the catalogue of reasons says that no docstring does: see errors.py."""

from collections.abc import Mapping
from typing import Final

from services.errors import Kind

RETRY: Final[Mapping[Kind | None, str]] = {
    Kind.INVALID: "no: the same request is refused again",
    Kind.NOT_FOUND: "no, unless somebody is about to make it",
    Kind.IN_USE: "yes, once whoever has it lets go",
    Kind.FENCED: "no: read what is there now, and begin anew",
    Kind.EXHAUSTED: "yes, with less, or later",
    Kind.UNAVAILABLE: "yes, with growing waits",
    Kind.DATA_LOSS: "no: it stays so until somebody acts",
    Kind.UNKNOWN_CALLER: "no, unless with other credentials",
    Kind.DENIED: "no, until the rules change",
    None: "yes, a few times; then report it",
}

WORDS: Final[Mapping[str, str]] = {
    "INTERNAL": "The service failed in a way that it did not foresee; its log has a line "
    "`unexpected` that tells how. Nothing of it is in the answer.",
    "UNREACHABLE": "A service cannot be connected to. `cause` has gRPC's words.",
    "CHANGED": "What a rebuild is to put in place is older than what is there by now: start it "
    "again.",
    "SPARK_JOB_FAILED": "Spark gave up on a topic's rebuild. Its own log tells why.",
}
"""What reasons mean that have no class of their own."""

REMEDIES: Final[Mapping[str, str]] = {
    "ALREADY_MARK_DELETED": "Nothing: the cursor is there, and further.",
    "CHECKSUM_MISMATCH": "Send the message again from the original: it was damaged on its way.",
    "CURSORS_REFUSED": "Subscribe again, as clients do: the subscription goes on with what is "
    "durable. If it comes again and again, report it: `because` names the refusal.",
    "CURSOR_CORRUPT": "Reset the cursor to a place that is known, or delete it: `seqgate cursor`.",
    "CURSORS_UNAVAILABLE": "See that the cursor service runs and answers; the log goes on without "
    "it, but snapshots, trims and subscriptions wait.",
    "DEAD_LETTER_REFUSED": "Make the dead letter topic, or see why it does not take the letter: "
    "`because` says so. The message waits.",
    "DEDUP_UNAVAILABLE": "See that the dedup service and Redis run; producers send again by "
    "themselves.",
    "GIVEN_UP": "Ask again, as clients do. If it comes again and again, report it: the log has a "
    "line `unexpected` that tells what was cancelled.",
    "DRAINING": "Connect again: another instance, or the next process, takes the call.",
    "ENTRY_CORRUPT": "Restore the store from a backup, or trim the topic past the damage.",
    "ENTRY_TOO_LARGE": "Cut the message into chunks, or have max_message_bytes raised.",
    "FENCED": "Stop: somebody newer has the topic, the subscription or the producer's name. A "
    "client opens again by itself.",
    "FILTERS_UNAVAILABLE": "See that the filter service runs; what waits for verdicts goes on by "
    "itself.",
    "FILTERS_UNREADABLE": "Set the subscription's filters again, or run the version that wrote "
    "them.",
    "INVALID_CONFIRMATION": "List each producer once, at most 10,000 entries, and end where the "
    "log does: `field` names what is wrong.",
    "INTERNAL": "Look for `unexpected` in the service's log, and report it.",
    "JAVA_ENDED": "Give the machine more memory, or Spark less (`spark.driver.memory`); "
    "`bin/java -version` in that folder says whether Java runs at all.",
    "LEASE_HELD": "Wait until the lease is over, or until its holder releases it.",
    "LEDGER_UNAVAILABLE": "See that the ledger service runs and answers.",
    "NOT_OWNER": "Ask the instance that `owner` names. Clients do so by themselves.",
    "PERMISSION_DENIED": "Have the right granted in the access file: the details name it.",
    "LEDGER_BUSY": "Send again after the delay. Clients do. If it goes on, raise "
    "unanswered_bytes_max, or publish less at a time.",
    "PRODUCER_BUSY": "Close the other producer of this name, or take the name over.",
    "PRODUCER_TAKEN_OVER": "Stop: another process publishes under this name.",
    "RECEIPTS_UNREAD": "Read receipts while you send. Connect again, and send what is unanswered "
    "with the same sequence ids.",
    "RECOVERING": "Wait: what deduplication lacks is read from the log. `seqgate dedup status` "
    "tells how much is left; a long one is `seqgate dedup rebuild`'s.",
    "SLOW_CONSUMER": "Read the stream faster, or grant fewer permits; then connect again.",
    "SLOW_READER": "Read the stream faster; then open it again after the last position received. "
    "Clients do. If it goes on, raise read_bytes_max.",
    "SNAPSHOT_TOO_LARGE": "Let the topic remember fewer producers: max_producers, or a shorter "
    "producer_inactivity_timeout_minutes.",
    "STATE_UNAVAILABLE": "See that Redis runs and answers within redis_timeout_s.",
    "SILENT_STREAM": "Open the stream when there is something to say, as clients do: its first "
    "message comes within `first_message_timeout_s`.",
    "SERVICE_BUSY": "Wait and try again, as clients do. If it lasts, `limit` names the setting to "
    "raise; or add replicas.",
    "STORE_FULL": "Make room on the store's disk, or trim topics; producers go on by themselves.",
    "STORE_UNAVAILABLE": "See the service's log for what the disk says; send again with the same "
    "sequence ids.",
    "SUBSCRIPTION_BUSY": "Close the consumers that are connected, or give the options that they "
    "have.",
    "SUBSCRIPTION_FAILED": "Connect again. Clients do. The dispatcher's log has what happened: "
    "report it.",
    "TOO_MANY_PRODUCERS": "Raise max_producers of the topic's policy, or let it evict.",
    "TOPIC_FAILED": "Connect again. Clients do. The ledger's log has what happened: report it.",
    "VERSION_CONFLICT": "Read the cursor again, and decide anew.",
    "WINDOW_EXCEEDED": "Keep to the window that Opened grants. Clients do.",
}
"""What to do about a reason, where there is more to say than of its kind."""
