"""The invariants of a history, checked as it happens and at its end.

TWICE         (P2) an id of a producer, or a chunk of an attempt, is stored twice while
              deduplication is on
REORDERED     a log, or a reader, has entries out of order
OVERTAKEN     (P4) a key's first deliveries are out of order
SPLICED       a chunk does not follow the previous chunk of its message
INVENTED      an entry or a delivery was never sent
BACKWARDS     append times decrease
LOST          (P1) a message has a receipt, and is not in the log
MISPLACED     a receipt names another position than the message's
CONFLICT      a receipt does not say that a message is the one stored under its id
NOT_STALE     a message was refused as STALE, and is in the log
NOT_TRIMMED   a message was refused as TRIMMED, and nothing was trimmed
SKIPPED       the cursor acknowledged an entry without a cause: no valid acknowledgement, no filter
              that rejects it, no dead letter, no trim, no unfinished attempt, no move of the
              subscription; or the dispatcher passed it for a false reason
UNDONE        the cursor revoked an acknowledgement, and was not moved back
RESURRECTED   (P6) a message was delivered after its acknowledgement was confirmed
NOT_DURABLE   an acknowledgement was confirmed, and is not in the cursor
SHARED_KEY    (P4) a key is in flight at two consumers
EARLY         a delayed message was delivered before its time
HELD          a message was delivered while a dead letter holds its key
LETTER_TWICE  a message is in the dead letter topic twice
LETTER_EARLY  a message was dead-lettered before it used up its redeliveries, after a redrive anew
REDRIVEN_TWICE  a letter is redriven again, or a message is replayed twice by one number
SETTLED       a letter comes back that was redriven, discarded or mended before, or whose mend has
              begun and is not complete
TORN          some chunks of a large message come back without the others
MISCOUNTED    a redrive's record counts other messages than those that came back
COPIED        a message passed through more dead letter topics than allowed
HEADLESS      chunks were delivered of a message that starts before the subscription
CUT           a chunk was stored although the start of its message was trimmed
FORGOTTEN     a connected producer was forgotten as inactive
EPOCH         a lease's epoch decreased, or a subscription was taken twice under one epoch
FOLD          (P7) the dedup state differs from the fold over the log
EXPLAINED     an answer of Explain is false
OVERDRAWN     a consumer's permits are negative by more than the rest of a batch
BUDGET        a limit of memory or concurrency is exceeded (budgets.py)
REFUSED       a large message was refused although chunking is on
SURPRISE      a service raised an unexpected error, or a process ended unexpectedly
ENDLESS       a history used up its processor time (history.py)
STUCK         pending work does not finish after faults have stopped
"""

from tests.simulation.system.checkers.administration import Administration
from tests.simulation.system.checkers.cursors import Cursors
from tests.simulation.system.checkers.dedup import Dedup, Folds
from tests.simulation.system.checkers.deliveries import Deliveries
from tests.simulation.system.checkers.logs import Logs
from tests.simulation.system.checkers.redrives import Redrives
from tests.simulation.system.checkers.terms import Terms
from tests.simulation.system.seen import Seen


class Checker:
    """All checkers of a history, fed with stores' effects and clients' observations."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.terms = Terms()
        self.dedup = Dedup(seen)
        self.folds = Folds(seen, self.dedup)
        self.cursors = Cursors(seen, self.terms)
        self.redrives = Redrives(seen, self.cursors)
        self.logs = Logs(seen, self.terms, self.dedup, self.cursors)
        self.deliveries = Deliveries(seen, self.terms)
        self.administration = Administration(seen, self.terms)
