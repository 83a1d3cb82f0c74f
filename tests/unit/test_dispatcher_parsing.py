"""A refusal of an unknown enum value names its field."""

import pytest

from seqgate.api.dispatcher.v1 import dispatcher_pb2 as pb
from seqgate.services.dispatcher.config import DispatcherConfig
from seqgate.services.dispatcher.errors import InvalidOptions
from seqgate.services.dispatcher.ports import InvalidChain
from seqgate.services.dispatcher.wire import parsing
from seqgate.types import TopicName

UNKNOWN = 99
TOPIC = TopicName.parse("t/n/topic")


@pytest.mark.parametrize("field", ["placement", "after_dead_letter"])
def test_an_unknown_option_is_refused_by_name(field: str) -> None:
    subscribe = pb.Subscribe(options=pb.SubscriptionOptions(type=pb.SUBSCRIPTION_TYPE_SHARED))
    setattr(subscribe.options, field, UNKNOWN)
    with pytest.raises(InvalidOptions) as caught:
        parsing.joining(TOPIC, "s", subscribe, DispatcherConfig())
    assert caught.value.field == f"options.{field}"


@pytest.mark.parametrize("field", ["policy", "mode"])
def test_an_unknown_filter_setting_is_refused_by_name(field: str) -> None:
    request = pb.SetFiltersRequest(topic="t/n/topic", subscription="s")
    setattr(request, field, UNKNOWN)
    with pytest.raises(InvalidChain) as caught:
        parsing.chain(request)
    assert caught.value.field == field
