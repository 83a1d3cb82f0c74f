"""What must hold of a history, checked as it happens and when it is over.

TWICE         (P2) an id of a producer, or a chunk of an attempt, is stored again while
              deduplication is on
REORDERED     a log has a producer's ids out of order
OVERTAKEN     (P4) a key's first deliveries are out of order
SPLICED       a chunk follows something else than the chunk before it
INVENTED      something is in the log, or was delivered, that nobody sent
BACKWARDS     append times go back
LOST          (P1) acknowledged to its producer, and not in the log
MISPLACED     a receipt names a place where the message is not
NOT_STALE     called overtaken, and in the log
SKIPPED       acknowledged by the cursor, and no delivery was acknowledged that counts, no filter
              that applied rejects it, it was not dead-lettered, not trimmed, no chunk of an attempt
              that ended unfinished, nobody moved the subscription over it; or it was passed for a
              reason that is not true
UNDONE        what the cursor counted as acknowledged it counts no more, and nobody moved it back
RESURRECTED   (P6) delivered again after its acknowledgement was answered
NOT_DURABLE   its acknowledgement was answered, and the cursor does not have it
SHARED_KEY    (P4) a key is in flight at two consumers
HELD          delivered though its key is held after a dead letter
LETTER_TWICE  in the dead letter topic more than once
LETTER_EARLY  in the dead letter topic, and did not fail as often as it may
COPIED        went through more dead letter topics than a message may
HEADLESS      chunks are delivered of a message that began before the subscription did
CUT           a chunk is stored behind a beginning that was trimmed
FORGOTTEN     a producer that is connected was forgotten as inactive
EPOCH         the epoch of a lease went back, or two instances, or one twice, took a subscription
              under the same
FOLD          (P7) the state of deduplication is not what folding the log gives
EXPLAINED     what Explain says is not so
OVERDRAWN     a consumer's permits are below zero by more than the rest of a batch
BUDGET        a buffer holds more than it may, or more is done at once (budgets.py)
REFUSED       a large message was refused, which should have been cut
SURPRISE      a service failed in a way that it did not foresee, or its process ended
ENDLESS       a process works, and time does not go on (history.py)
STUCK         faults have stopped, and something that can go on does not
"""

from tests.simulation.system.checkers.administration import Administration
from tests.simulation.system.checkers.cursors import Cursors
from tests.simulation.system.checkers.dedup import Dedup, Folds
from tests.simulation.system.checkers.deliveries import Deliveries
from tests.simulation.system.checkers.logs import Logs
from tests.simulation.system.checkers.terms import Terms
from tests.simulation.system.seen import Seen


class Checker:
    """See the module. Its parts are told what stores do, and what clients see."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.terms = Terms()
        self.dedup = Dedup(seen)
        self.folds = Folds(seen, self.dedup)
        self.cursors = Cursors(seen, self.terms)
        self.logs = Logs(seen, self.terms, self.dedup, self.cursors)
        self.deliveries = Deliveries(seen, self.terms)
        self.administration = Administration(seen, self.terms)
