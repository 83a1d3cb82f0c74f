"""The rights that each method of the dispatcher service needs."""

from collections.abc import Sequence
from typing import Any, Final

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.services.dispatcher.letters.graveyard import default_topic
from seqgate.services.runtime.access import Need, Part, Verb
from seqgate.services.runtime.requests import read_topic
from seqgate.services.runtime.rights import (
    NeedsOf,
    Right,
    Rights,
    Shown,
    of_listed,
    of_subscription,
    of_topic,
    table,
    the_topic,
)

PUBLISH, CONSUME, READ, ADMINISTER = Verb.PUBLISH, Verb.CONSUME, Verb.READ, Verb.ADMINISTER

SERVICE: Final = pb.DESCRIPTOR.services_by_name["DispatcherService"]


def _consume(request: Any) -> Sequence[Need]:
    if request.WhichOneof("request") != "subscribe":
        return ()
    given = request.subscribe
    needs = [Need(frozenset({CONSUME}), the_topic(given.topic), Part(given.subscription))]
    if given.options.dead_letter_topic:
        # The dispatcher publishes there with its own rights, so the consumer's are checked here.
        letters = the_topic(given.options.dead_letter_topic)
        needs.append(Need(frozenset({PUBLISH}), letters))
    return needs


def _of_letters(*verbs: Verb) -> NeedsOf:
    """Any of these verbs on the subscription, and the right to read another dead letter topic than
    its own: the dispatcher reads there with its own rights."""
    of_the_subscription = of_subscription(*verbs)

    def needs(request: Any) -> Sequence[Need]:
        found = list(of_the_subscription(request))
        if request.dead_letter_topic:
            wanted = frozenset({READ, CONSUME})
            found.append(Need(wanted, the_topic(request.dead_letter_topic)))
        return found

    return needs


def _mend(request: Any) -> Sequence[Need]:
    """The right to administer the subscription, and to publish to the dead letter topic: the
    dispatcher publishes the mended letter with its own rights."""
    of_the_subscription = of_subscription(ADMINISTER)(request)
    where = request.dead_letter_topic
    if not where:
        where = str(default_topic(read_topic(request.topic), request.subscription))
    return [*of_the_subscription, Need(frozenset({PUBLISH}), the_topic(where))]


_OF_CONSUMERS: Final = of_subscription(CONSUME, ADMINISTER)
_OF_OPERATORS: Final = of_subscription(ADMINISTER)

RIGHTS: Final[Rights] = table(
    SERVICE.full_name,
    {
        "Consume": Right(_consume),
        "CreateSubscription": Right(_OF_CONSUMERS),
        "GetSubscription": Right(_OF_CONSUMERS),
        "ListSubscriptions": Right(
            of_topic(CONSUME, ADMINISTER),
            shown=Shown("subscriptions", of_listed(CONSUME, ADMINISTER)),
        ),
        "DeleteSubscription": Right(_OF_OPERATORS),
        "ResetSubscription": Right(_OF_CONSUMERS),  # as Seek on the stream
        "UpdateSubscriptionProperties": Right(_OF_OPERATORS),
        "ReleaseKey": Right(_OF_CONSUMERS),
        "ListDeadLetters": Right(_of_letters(CONSUME, ADMINISTER)),
        "RedriveDeadLetters": Right(_of_letters(CONSUME, ADMINISTER)),
        "StartRedrive": Right(_of_letters(CONSUME, ADMINISTER)),
        "EstimateRedrive": Right(_of_letters(CONSUME, ADMINISTER)),
        "GetRedrive": Right(_OF_CONSUMERS),
        "ListRedrives": Right(_OF_CONSUMERS),
        "StopRedrive": Right(_OF_CONSUMERS),
        "DiscardDeadLetters": Right(_of_letters(CONSUME, ADMINISTER)),
        "MendDeadLetter": Right(_mend),
        "ListLetterOperations": Right(_OF_CONSUMERS),
        "GetDeadLetter": Right(_of_letters(CONSUME)),  # it has the payload
        "SetFilters": Right(_OF_OPERATORS),
        "GetFilters": Right(_OF_CONSUMERS),
        "AnalyzeBacklog": Right(_OF_CONSUMERS),
        "Report": Right(_OF_CONSUMERS),
        "Explain": Right(_OF_CONSUMERS),
        "GetMessageHistory": Right(_OF_CONSUMERS),
    },
    SERVICE.methods_by_name,
)
"""By the full names of the methods."""
