"""A visit: who asks for a page, and what the page may ask and remember."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Final, NamedTuple

from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.client._calls import Calls
from seqgate.client._frames import Sample
from seqgate.services.console.alerts import Letters
from seqgate.services.console.config import ConsoleConfig
from seqgate.services.console.history import History

SAMPLES_MAX: Final = 200
"""The most samples of topics kept, for rates; the one that was longest unused goes first."""

LETTERS_MAX: Final = 1_000
"""The most counts of letters kept; likewise."""

Query = Mapping[str, str]
Values = dict[str, Any]


class Reader(NamedTuple):
    """Who looks: a digest of the token, which keeps readers' histories apart."""

    name: str

    @classmethod
    def of(cls, token: str) -> "Reader":
        return cls(hashlib.sha256(token.encode()).hexdigest())


@dataclass(slots=True)
class Memory:
    """What the console remembers between visits, of each reader apart."""

    history: History = field(default_factory=History)
    samples: dict[tuple[str, ...], Sample] = field(default_factory=dict)
    instances: tuple[float, Sequence[Values]] = (-inf, ())
    """When the instances were checked, and what was found."""
    letters: dict[tuple[str, ...], tuple[float, int, Letters]] = field(default_factory=dict)
    """By reader, topic and subscription: when letters were counted, at which length of their topic,
    and what was found."""

    def exchange(self, key: tuple[str, ...], sample: Sample) -> Sample | None:
        """Keep what rates take of a sample. Returns that of the one before it."""
        before = self.samples.pop(key, None)
        _keep(self.samples, key, _of_counts(sample), SAMPLES_MAX)
        return before

    def count(self, key: tuple[str, ...], counted: tuple[float, int, Letters]) -> None:
        self.letters.pop(key, None)
        _keep(self.letters, key, counted, LETTERS_MAX)


def _of_counts(sample: Sample) -> Sample:
    """A sample whose reports have their counts alone: consumers and keys may be thousands."""
    topics = {
        name: replace(
            topic,
            subscriptions=[
                replace(each, report=each.report and _counts_of(each.report))
                for each in topic.subscriptions or ()
            ],
        )
        for name, topic in sample.topics.items()
    }
    return replace(sample, topics=topics)


def _counts_of(report: dispatcher_pb2.ReportResponse) -> dispatcher_pb2.ReportResponse:
    return dispatcher_pb2.ReportResponse(epoch=report.epoch, totals=report.totals)


def _keep(kept: dict[tuple[str, ...], Any], key: tuple[str, ...], value: Any, most: int) -> None:
    if len(kept) >= most:
        kept.pop(next(iter(kept)))
    kept[key] = value


@dataclass(frozen=True, slots=True)
class Visit:
    """A reader's request for a page.

    Attributes:
        calls: to the services, with the reader's token.
        prefix: the one with which the reader last listed topics; empty: none.
    """

    reader: Reader
    query: Query
    calls: Calls
    memory: Memory
    config: ConsoleConfig
    prefix: str = ""
