"""The port of the filter service: an engine that runs expressions.

tests/conformance judges every adapter by the same suite.
"""

from typing import Protocol

from seqgate.services.filter.core.program import Compiled


class Engine(Protocol):
    """CEL, the Common Expression Language, with the variables of `core.reads`."""

    def compile(self, text: str) -> Compiled:
        """Parse and type-check an expression of at most EXPRESSION_BYTES_MAX.

        Raises:
            InvalidExpression: it is malformed, or its type is neither bool nor duration.
        """
        ...
