"""The pages. Each is a coroutine that asks the services as the reader, and returns the values of
the template of its name.

    path ──▶ PAGES ──▶ page(visit) ──▶ values ──▶ templates/NAME.html

A page changes nothing. What a form changes is in ACTIONS: an action returns the path of the page
that shows what it did, or values of the form's page, with what is wrong.

visit.py, query.py, answers.py and owners.py have what pages share: what they may ask and remember,
what a URL asks for, parts of the services' answers, and what needs an owner.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

from seqgate.services.console.pages.cluster import cluster
from seqgate.services.console.pages.letters import letter, letters, redrive, redriven
from seqgate.services.console.pages.life import life
from seqgate.services.console.pages.mending import (
    discard,
    discarded,
    mend,
    mended,
    operations,
)
from seqgate.services.console.pages.messages import message, messages
from seqgate.services.console.pages.overview import overview
from seqgate.services.console.pages.owners import taken
from seqgate.services.console.pages.redrives import (
    redrive_many,
    redrive_many_started,
    redrives,
    replay,
    replay_started,
    stopped,
)
from seqgate.services.console.pages.subscriptions import subscription, subscriptions, why
from seqgate.services.console.pages.topics import topic, topics
from seqgate.services.console.pages.visit import Query, Values, Visit

Page = Callable[[Visit], Awaitable[Values]]
Action = Callable[[Visit, Query], Awaitable[str | Values]]


class Place(NamedTuple):
    """A page, and where and how it is shown.

    Attributes:
        page: its name is the template's.
        section: the path of the page in the navigation under which it stands.
        is_live: whether it updates itself.
    """

    page: Page
    section: str
    is_live: bool = True

    @property
    def template(self) -> str:
        return f"{self.page.__name__}.html"


PAGES: Final[Mapping[str, Place]] = {
    "/": Place(overview, "/"),
    "/topics": Place(topics, "/topics"),
    "/topic": Place(topic, "/topics"),
    "/messages": Place(messages, "/topics", is_live=False),
    "/message": Place(message, "/topics", is_live=False),
    "/life": Place(life, "/topics"),
    "/subscriptions": Place(subscriptions, "/subscriptions"),
    "/subscription": Place(subscription, "/subscriptions"),
    "/why": Place(why, "/subscriptions"),
    "/letters": Place(letters, "/subscriptions"),
    "/letter": Place(letter, "/subscriptions"),
    "/redrive": Place(redrive, "/subscriptions", is_live=False),
    "/mend": Place(mend, "/subscriptions", is_live=False),
    "/discard": Place(discard, "/subscriptions", is_live=False),
    "/operations": Place(operations, "/subscriptions"),
    "/redrive-many": Place(redrive_many, "/subscriptions", is_live=False),
    "/replay": Place(replay, "/subscriptions", is_live=False),
    "/redrives": Place(redrives, "/subscriptions"),
    "/cluster": Place(cluster, "/cluster"),
}
"""By path."""

ACTIONS: Final[Mapping[str, Action]] = {
    "/mend": mended,
    "/discard": discarded,
    "/redrive": redriven,
    "/redrive-many": redrive_many_started,
    "/replay": replay_started,
    "/redrives": stopped,
    "/take": taken,
}
"""What a form sent to a path does."""
