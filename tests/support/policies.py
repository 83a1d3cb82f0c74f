"""Fixed policies for tests."""

from seqgate.services.dedup.core.policy import EffectivePolicy
from seqgate.types import TopicName


class FixedPolicies:
    """The same policy for every topic."""

    error = ""

    def __init__(self, policy: EffectivePolicy) -> None:
        self.policy = policy

    def known(self, topic: TopicName) -> None:
        return None

    async def effective(self, topic: TopicName) -> EffectivePolicy:
        return self.policy

    async def forget(self, topic: TopicName) -> None:
        return None
