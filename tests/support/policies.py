"""Policies that a test chooses."""

from seqgate.types import TopicName
from services.dedup.core.policy import EffectivePolicy


class FixedPolicies:
    """The same policy for every topic."""

    error = ""

    def __init__(self, policy: EffectivePolicy) -> None:
        self.policy = policy

    async def effective(self, topic: TopicName) -> EffectivePolicy:
        return self.policy

    async def forget(self, topic: TopicName) -> None:
        return None
