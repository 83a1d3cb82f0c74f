"""The catalogue of reasons: what each refusal means, and its remedy.

python -m tools.dev.errors            write docs/errors.md
python -m tools.dev.errors --check    exit 1 if the page is stale, or a reason lacks a meaning or a
                                      remedy of its own

A reason is documented where it is raised: by the docstring of its class, which names in backticks
the details that the code does not show. Reasons without a class of their own are in WORDS. Remedies
are in REMEDIES: each fits one reason only, and the fields and settings that it names exist.
"""

import ast
import importlib
import pkgutil
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Final, NamedTuple, TypeVar

import seqgate
import seqgate.services
import tools
from seqgate.errors import BY_REASON, SeqgateError
from seqgate.services import errors
from seqgate.services.errors import DomainError, Kind
from seqgate.services.runtime.status import code_name
from tools.dev.command import carry_out
from tools.dev.remedies import REMEDIES, RETRY, RETRY_OF, WORDS

E = TypeVar("E", bound=Exception)

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "errors.md"

SERVICES: Final = ("ledger", "dedup", "cursor", "dispatcher", "filter")
COMMON: Final = "all"

SHARED: Final = {
    "seqgate.services.cursors": "dedup, dispatcher, ledger",
    "seqgate.services.deduplication": "dedup, ledger",
    "seqgate.services.runtime.deduplication": "dedup",
}
"""The services that raise the refusals of a shared module; all of them by default."""

INSIDE: Final = "Stays inside the service"
"""Marks the docstring of a refusal that callers never see."""

PEERS: Final = frozenset({"tools.bench.jetstream", "tools.bench.rabbitmq"})
"""Modules without errors of their own, for which only the bench installs packages."""

WORDS_MIN: Final = 4
"""The fewest words of a remedy: a shorter one adds nothing to its kind."""

NO_DETAILS: Final = ("message", "field", "retry_after_s")
"""Arguments of a refusal that are not details."""


class Reason(NamedTuple):
    name: str
    kind: Kind | None
    meanings: Mapping[str, str]
    """By service."""
    details: frozenset[str]
    tells_when: bool = False
    """Some refusals give a delay for the retry."""


class ClientReason(NamedTuple):
    """A reason that only the client, the command line or a job raises."""

    name: str
    type: str
    meaning: str


# ---- the reasons


def service_reasons() -> list[Reason]:
    _import_all(seqgate.services)
    given = _arguments()
    found: dict[str, list[type[DomainError]]] = defaultdict(list)
    for refusal in _subclasses(DomainError):
        if INSIDE not in _words(refusal):
            found[refusal.reason].append(refusal)
    reasons = [_reason(name, classes, given) for name, classes in found.items()]
    reasons.append(Reason("INTERNAL", None, {COMMON: WORDS["INTERNAL"]}, frozenset()))
    return sorted(reasons)


def client_reasons() -> list[ClientReason]:
    for package in (seqgate, tools):
        _import_all(package)
    of_services = {each.name for each in service_reasons()}
    found = {
        each.default_reason: ClientReason(each.default_reason, each.__name__, _words(each))
        for each in _subclasses(SeqgateError)
        if each.__dict__.get("default_reason") and each.default_reason not in of_services
    }
    for name in literals() - of_services - found.keys():
        found[name] = ClientReason(name, "", WORDS.get(name, ""))
    return sorted(found.values())


def literals() -> set[str]:
    """The reasons that code outside the services sets by name: reason="..."."""
    return {
        keyword.value.value
        for folder in ("seqgate", "tools")
        for _, call in _calls(ROOT / folder)
        for keyword in call.keywords
        if keyword.arg == "reason"
        and isinstance(keyword.value, ast.Constant)
        and isinstance(keyword.value.value, str)
        and keyword.value.value
    }


def faults() -> list[str]:
    """Reasons without a meaning or a remedy, and texts without a reason."""
    found = []
    reasons = service_reasons()
    for each in reasons:
        for who, meaning in each.meanings.items():
            if not meaning:
                found.append(f"{each.name} of {who}: its class has no docstring")
        if each.name not in BY_REASON:
            found.append(f"{each.name}: seqgate/errors.py has no class for it")
        if each.kind is not None and RETRY_OF.get(each.name) == RETRY[each.kind]:
            found.append(f"{each.name}: RETRY_OF repeats what its kind says")
    found += [f"{each.name}: no docstring, nor words" for each in client_reasons() if not each[2]]
    known = {each.name for each in reasons} | {each.name for each in client_reasons()}
    found += [f"{name}: there is no such reason" for name in sorted(BY_REASON.keys() - known)]
    found += [
        f"{name}: words for no reason"
        for name in sorted((WORDS.keys() | REMEDIES.keys() | RETRY_OF.keys()) - known)
    ]
    return found + remedy_faults({name: REMEDIES.get(name, "") for name in sorted(known)})


def remedy_faults(remedies: Mapping[str, str]) -> list[str]:
    """Remedies that are missing, generic, shared, or name an unknown field or setting."""
    plain = {name: _plain(text) for name, text in remedies.items()}
    generic = {_plain(text) for text in _kinds().values()}
    uses = Counter(plain.values())
    known = _identifiers()
    found = []
    for name, text in plain.items():
        if not text:
            found.append(f"{name}: no remedy")
        elif text in generic or len(text.split()) < WORDS_MIN:
            found.append(f"{name}: a generic remedy")
        elif uses[text] > 1:
            found.append(f"{name}: shares its remedy")
        found += [
            f"{name}: its remedy names {each}, which does not exist"
            for each in remedies[name].split("`")[1::2]
            if re.fullmatch(r"[a-z_.]+", each) and not set(each.strip(".").split(".")) <= known
        ]
    return found


def _plain(remedy: str) -> str:
    return " ".join(re.findall(r"[a-z0-9_]+", remedy.lower()))


def _reason(
    name: str, classes: list[type[DomainError]], given: Mapping[str, frozenset[str]]
) -> Reason:
    meanings: dict[str, str] = {}
    details: set[str] = set()
    for each in sorted(classes, key=lambda each: each.__module__):
        who, meaning = _who(each.__module__), _words(each)
        same = next((other for other, words in meanings.items() if words == meaning), None)
        if same is not None:
            del meanings[same]
            who = f"{same}, {who}"
        meanings[who] = meaning
        details |= given.get(each.__name__, frozenset()) | set(meaning.split("`")[1::2])
    (kind,) = {each.kind for each in classes}
    tells_when = "retry_after_s" in details
    return Reason(name, kind, meanings, frozenset(details - {*NO_DETAILS}), tells_when)


def _who(module: str) -> str:
    if module in SHARED:
        return SHARED[module]
    part = module.split(".")[2]
    return part if part in SERVICES else COMMON


def _words(refusal: type[Exception]) -> str:
    words = refusal.__dict__.get("__doc__") or ""
    return " ".join(words.split())


@cache
def _identifiers() -> frozenset[str]:
    """All words of protos and code, which include the names of fields, settings and options."""
    files = [*(ROOT / "protos" / "seqgate").rglob("*.proto")]
    for folder in ("seqgate", "services"):
        files += (each for each in (ROOT / folder).rglob("*.py") if "api" not in each.parts)
    return frozenset(word for file in files for word in re.findall(r"\w+", file.read_text()))


@cache
def _arguments() -> dict[str, frozenset[str]]:
    """The names of the details that the code passes to each class of refusals."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, call in _calls(ROOT / "services"):
        for keyword in call.keywords:
            if keyword.arg is not None:
                found[name].add(keyword.arg)
                continue
            for part in ast.walk(keyword.value):
                if isinstance(part, ast.Dict):
                    keys = (key.value for key in part.keys if isinstance(key, ast.Constant))
                    found[name].update(key for key in keys if isinstance(key, str))
                elif isinstance(part, ast.Name) and part.id == "because":
                    found[name].add(part.id)
    return {name: frozenset(names) for name, names in found.items()}


@cache
def _calls(folder: Path) -> list[tuple[str, ast.Call]]:
    return [
        (getattr(node.func, "id", getattr(node.func, "attr", "")), node)
        for file in sorted(folder.rglob("*.py"))
        if "api" not in file.relative_to(folder).parts
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
    ]


@cache
def _import_all(package: ModuleType) -> None:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        is_left_out = module.name in PEERS or module.name.startswith("seqgate.api.")
        if not module.name.endswith("__main__") and not is_left_out:
            importlib.import_module(module.name)


def _subclasses(base: type[E]) -> Iterator[type[E]]:
    """Our subclasses, in no order; tests define more."""
    for each in base.__subclasses__():
        if each.__module__.split(".")[0] in ("seqgate", "tools"):
            yield each
        yield from _subclasses(each)


# ---- the page


def page() -> str:
    lines = [_HEAD]
    lines += ["| kind | gRPC code | in general | retry |", "| --- | --- | --- | --- |"]
    for kind, remedy in _kinds().items():
        lines.append(f"| {_shown(kind)} | `{code_name(kind)}` | {remedy} | {RETRY[kind]} |")
    lines += ["", "## Reasons of the services", ""]
    for reason in service_reasons():
        lines += _section(reason)
    lines += [_CLIENT_HEAD]
    for each in client_reasons():
        type_ = [f"`{each.type}`.", ""] if each.type else []
        lines += [f"### {each.name}", "", *type_, each.meaning, ""]
        lines += [f"- **What to do:** {REMEDIES[each.name]}", ""]
    lines.pop()
    return "\n".join(lines) + "\n"


_HEAD: Final = """\
# Errors and remedies

<!-- Generated by tools/dev/errors.py from the code; do not edit. -->

A service refuses a request with a gRPC status that carries a `google.rpc.ErrorInfo` of the domain
`seqgate`: `reason` is a stable identifier that is never renamed, `metadata` has the details.
`google.rpc.RetryInfo` gives the delay before a retry, where one helps; `google.rpc.BadRequest`
names the invalid field. In Python, each reason maps to an exception of `seqgate.errors` with the
attributes `reason`, `details` and `retry_after_s`. Answers within a stream (a receipt, the answer
to a settlement) carry the same status.

Each reason below has a remedy of its own. Its kind says whether a retry helps:
"""

_CLIENT_HEAD: Final = """\
## Reasons of the client, the command line and the jobs

Services do not raise these. (The client also raises reasons of the services without a call, when
it can tell that the service would refuse the request.)
"""


def _section(reason: Reason) -> list[str]:
    code = "INTERNAL" if reason.kind is None else code_name(reason.kind)
    kind = "a bug in the service" if reason.kind is None else _shown(reason.kind)
    retry = RETRY_OF.get(reason.name) or RETRY[reason.kind]
    if reason.tells_when:
        retry += "; `RetryInfo` may give the delay"
    lines = [
        f"### {reason.name}",
        "",
        f"`{code}`, {kind}; `{BY_REASON[reason.name].__name__}`.",
        "",
    ]
    for who, meaning in reason.meanings.items():
        lines.append(meaning if len(reason.meanings) == 1 else f"- {who}: {meaning}")
    lines += ["", f"- **Raised by:** {'; '.join(reason.meanings)}"]
    lines += [f"- **What to do:** {REMEDIES[reason.name]}", f"- **Retry:** {retry}"]
    if reason.details:
        lines.append(f"- **Details:** {', '.join(f'`{each}`' for each in sorted(reason.details))}")
    return [*lines, ""]


def _shown(kind: Kind) -> str:
    return kind.name.lower().replace("_", " ")


def _kinds() -> dict[Kind, str]:
    """The advice for each kind in services/errors.py."""
    tree = ast.parse(Path(errors.__file__).read_text())
    (body,) = (
        each.body for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "Kind"
    )
    found: dict[Kind, str] = {}
    for name, words in zip(body[1::2], body[2::2], strict=True):
        assert isinstance(name, ast.Assign)
        assert isinstance(words, ast.Expr)
        found[Kind[ast.unparse(name.targets[0])]] = ast.literal_eval(words.value)
    return found


def check() -> list[str]:
    found = faults()
    if not PAGE.exists() or PAGE.read_text() != page():
        found.append("docs/errors.md is stale: run make errors")
    return found


def write() -> list[str]:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    return []


if __name__ == "__main__":
    sys.exit(carry_out(__doc__, {"": write, "--check": check}))
