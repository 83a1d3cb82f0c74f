"""The span of each sub-expression in the text: from its first character to after its last.

The engine reports one place for a node, that of its own token: an operator, a dot, a bracket. The
node's span covers that token, the spans of its parts, and the partners of their brackets.
"""

import re
from bisect import bisect_right
from collections.abc import Mapping
from typing import Final, NamedTuple

from seqgate.services.filter.core.syntax import Call, Constant, Loop, Node, Select, children

_TOKEN: Final = re.compile(
    r"""
    (?P<blank>\s+|//[^\n]*)
    |(?P<text>[rRbB]{0,2}(?:\"{3}(?:\\.|[\s\S])*?\"{3}|'{3}(?:\\.|[\s\S])*?'{3}
        |"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))
    |(?P<number>0[xX][0-9a-fA-F]+[uU]?|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[uU]?)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<sign>&&|\|\||[=!<>]=|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_CLOSING: Final = {"(": ")", "[": "]", "{": "}"}


class Span(NamedTuple):
    """A part of the text, in characters from 0."""

    start: int
    end: int


class Token(NamedTuple):
    """A piece of the text."""

    start: int
    end: int
    text: str


def spans_of(text: str, root: Node) -> Mapping[int, Span]:
    """The span of each node that has a place in the text, by its id."""
    return _Spans(text).of(root)


class _Spans:
    def __init__(self, text: str) -> None:
        self._tokens = [
            Token(found.start(), found.end(), found.group())
            for found in _TOKEN.finditer(text)
            if found.lastgroup != "blank"
        ]
        self._starts = [each.start for each in self._tokens]
        self._partners = self._pair()
        self._spans: dict[int, Span] = {}

    def of(self, root: Node) -> Mapping[int, Span]:
        self._visit(root)
        return self._spans

    def _pair(self) -> dict[int, int]:
        """The partner of each bracket, by token index."""
        partners: dict[int, int] = {}
        is_open: list[int] = []
        for index, token in enumerate(self._tokens):
            if token.text in _CLOSING:
                is_open.append(index)
            elif token.text in _CLOSING.values() and is_open:
                partners[is_open[-1]] = index
                partners[index] = is_open.pop()
        return partners

    def _visit(self, node: Node) -> Span | None:
        if isinstance(node, Loop):  # its other parts have no text of their own, or are its body
            for each in (node.condition, node.step):
                self._visit(each)
            parts = [self._visit(node.over)]
        else:
            parts = [self._visit(each) for each in children(node)]
        found = [each for each in (*parts, self._own(node)) if each is not None]
        if not found:
            return None
        span = Span(min(each.start for each in found), max(each.end for each in found))
        return self._spans.setdefault(node.id, self._balanced(span))

    def _own(self, node: Node) -> Span | None:
        """The token of a node, with the parts that belong to it on either side."""
        if node.at is None or not self._tokens:
            return None
        index = max(0, bisect_right(self._starts, node.at) - 1)
        first, last = index, index
        token = self._tokens[index]
        following = self._tokens[index + 1].text if index + 1 < len(self._tokens) else ""
        is_macro = isinstance(node, Loop) or (isinstance(node, Select) and node.is_test)
        if token.text == "(" and (is_macro or isinstance(node, Call)):
            first = max(0, index - 1)  # the function's name
        elif (token.text == "." and following) or (
            token.text == "-" and isinstance(node, Constant) and following
        ):
            last = index + 1
        last = max(last, self._partners.get(last, last))
        return Span(self._tokens[first].start, self._tokens[last].end)

    def _balanced(self, span: Span) -> Span:
        """The span, extended to the partners of its brackets."""
        start, end = span
        first = max(0, bisect_right(self._starts, start) - 1)
        last = max(0, bisect_right(self._starts, end - 1) - 1)
        for index in range(first, last + 1):
            partner = self._partners.get(index)
            if partner is not None:
                start = min(start, self._tokens[partner].start)
                end = max(end, self._tokens[partner].end)
        return Span(start, end)
