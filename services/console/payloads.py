"""A payload for people: as text, as JSON, as hex."""

import json
from typing import Any, Final, NamedTuple

from seqgate.api.entry.v1 import entry_pb2
from seqgate.errors import InvalidRequestError
from seqgate.payloads import PayloadDamaged

SHOWN_BYTES_MAX: Final = 8 * 1024
"""The most bytes of a payload that a page shows."""

JSON_BYTES_MAX: Final = 64 * 1024
"""The largest payload that is parsed as JSON, in bytes."""

OPENED_BYTES_MAX: Final = 16 * 1024 * 1024
"""The largest payload that is decompressed, in bytes."""

FORMS: Final = ("json", "text", "hex")

ROW: Final = 16
"""The bytes in a row of hex."""


class Shown(NamedTuple):
    """A payload in one form.

    Attributes:
        form: one of FORMS.
        forms: the forms that it has.
        left_out: the bytes, or for JSON the characters, that are not shown.
    """

    form: str
    forms: tuple[str, ...]
    text: str
    left_out: int


def shown(payload: bytes, form: str = "") -> Shown:
    """A payload in this form or, if it lacks that form, in the first one that it has."""
    texts: dict[str, tuple[str, int]] = {}
    parsed = _json(payload)
    if parsed is not None:
        texts["json"] = (parsed[:SHOWN_BYTES_MAX], max(0, len(parsed) - SHOWN_BYTES_MAX))
    left_out = max(0, len(payload) - SHOWN_BYTES_MAX)
    text = _text(payload[:SHOWN_BYTES_MAX], is_cut=left_out > 0)
    if text is not None:
        texts["text"] = (text, left_out)
    rows = payload[: SHOWN_BYTES_MAX // 4]
    texts["hex"] = (_hex(rows), len(payload) - len(rows))
    chosen = form if form in texts else next(iter(texts))
    return Shown(chosen, tuple(texts), *texts[chosen])


def editable(payload: bytes, form: str = "") -> tuple[str, str]:
    """A payload as text of a form: its form, and all of it. JSON stays as it is written."""
    text = _text(payload, is_cut=False)
    if form == "hex" or text is None:
        rows = (payload[start : start + ROW].hex(" ") for start in range(0, len(payload), ROW))
        return "hex", "\n".join(rows)
    return ("json" if form != "text" and _json(payload) is not None else "text"), text


def parsed(form: str, text: str, before: bytes) -> bytes:
    """The bytes of a form's text, as editable gave it. A browser sends every line's end as CR LF.
    Raises InvalidRequestError."""
    if form == "hex":
        try:
            return bytes.fromhex(text)
        except ValueError as error:
            raise InvalidRequestError(
                "the payload is not hexadecimal: two digits a byte"
            ) from error
    if b"\r\n" not in before:
        text = text.replace("\r\n", "\n")
    if form == "json":
        try:
            json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"the payload is not JSON: {error}") from error
    return text.encode()


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def check_size(metadata: entry_pb2.EntryMetadata) -> None:
    """Raises PayloadDamaged if a payload is too large to decompress for a page."""
    if metadata.compression and metadata.uncompressed_size > OPENED_BYTES_MAX:
        raise PayloadDamaged(
            f"the payload has {metadata.uncompressed_size:,} bytes, too many to decompress "
            f"(limit {OPENED_BYTES_MAX // 2**20} MiB)"
        )


def key_text(key: bytes) -> str:
    """A key as text; as hex with a prefix, if it is not UTF-8."""
    text = _text(key, is_cut=False)
    return f"0x{key.hex()}" if text is None else text


def _json(payload: bytes) -> str | None:
    if len(payload) > JSON_BYTES_MAX:
        return None
    try:
        return json.dumps(json.loads(payload), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def _text(payload: bytes, *, is_cut: bool) -> str | None:
    for cut in range(4 if is_cut else 1):  # a character may be cut in two
        try:
            text = payload[: len(payload) - cut].decode()
        except UnicodeDecodeError:
            continue
        return None if any(ord(each) < 32 and each not in "\t\r\n" for each in text) else text
    return None


def _hex(payload: bytes) -> str:
    rows = []
    for start in range(0, len(payload), ROW):
        row = payload[start : start + ROW]
        letters = "".join(chr(each) if 32 <= each < 127 else "." for each in row)
        rows.append(f"{start:08x}  {row.hex(' '):<{ROW * 3 - 1}}  {letters}")
    return "\n".join(rows)
