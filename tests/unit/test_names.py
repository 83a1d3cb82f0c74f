"""tools/dev/names.py: untyped stubs and class names with two meanings are found."""

from pathlib import Path

import pytest

from tools.dev.names import faults


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small checkout without faults, laid out like ours."""
    write(tmp_path, "services/ledger/core/log.py", "class Log: ...")
    write(tmp_path, "services/runtime/sqlite.py", "class _Log: ...")
    write(tmp_path, "seqgate/client/_reader.py", "class Log: ...")
    write(tmp_path, "tools/bench/load.py", "class Load: ...")
    (tmp_path / "seqgate" / "services").symlink_to("../services")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_repository_has_no_faults() -> None:
    assert faults() == []


def test_a_checkout_without_faults_passes(checkout: Path) -> None:
    assert faults(checkout) == []


@pytest.mark.parametrize(
    ("code", "stub"),
    [
        ("stub: Any = LedgerServiceStub(channel)", "stub"),
        ("stub: typing.Any = pb_grpc.LedgerServiceStub(channel)", "stub"),
        ('stub: "Any" = pb_grpc.LedgerServiceStub(channel)', "stub"),
        ("health: Any = health_pb2_grpc.HealthStub(channel)", "health"),
        ("self._calls: Any = v1.pb_grpc.LedgerServiceStub(channel)", "self._calls"),
        ("self._stub: Any = opened(channel)", "self._stub"),
        ("lease_stub: Any | None = None", "lease_stub"),
        ("class Log:\n    stub: Any", "stub"),
        ("def read(stub: Any): ...", "stub"),
        ("async def read(*, lease_stub: Any): ...", "lease_stub"),
    ],
)
@pytest.mark.parametrize("file", ["services/extra.py", "seqgate/jobs/audit/a.py", "tools/dev/a.py"])
def test_an_untyped_stub_is_found_once(checkout: Path, file: str, code: str, stub: str) -> None:
    write(checkout, file, code)
    line = code.count("\n") + 1
    fault = f"{file}:{line}: the stub {stub} is annotated as Any; name its type"
    assert faults(checkout) == [fault]


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("tools/dev/a.py", "stub = LedgerServiceStub(channel)"),
        ("tools/dev/a.py", "def read(stub: LedgerServiceStub, answer: Any): ..."),
        ("tools/dev/a.py", 'def read(stub: "pb_grpc.LedgerServiceAsyncStub"): ...'),
        ("tools/dev/a.py", "def read(stub): ..."),
        ("tools/dev/a.py", "stubborn: Any = call()"),
        ("seqgate/api/ledger/v1/a.py", "stub: Any = LedgerServiceStub(channel)"),
        ("tests/unit/a.py", "stub: Any = LedgerServiceStub(channel)"),
    ],
)
def test_other_code_passes(checkout: Path, file: str, code: str) -> None:
    write(checkout, file, code)
    assert faults(checkout) == []


@pytest.mark.parametrize(
    ("one", "other", "room"),
    [
        ("services/ledger/shell/a.py", "services/ledger/wire.py", "services/ledger"),
        ("services/runtime/a.py", "services/runtime/b.py", "services/runtime"),
        ("seqgate/client/_a.py", "seqgate/client/_b.py", "seqgate/client"),
        ("seqgate/cli/_a.py", "seqgate/cli/_b.py", "seqgate/cli"),
        ("seqgate/spark/_a.py", "seqgate/spark/_b.py", "seqgate/spark"),
        ("tools/bench/a.py", "tools/bench/b.py", "tools/bench"),
    ],
)
@pytest.mark.parametrize("code", ["class {}: ...", "def f():\n    class {}(Protocol): ..."])
@pytest.mark.parametrize("name", ["Share", "_Share"])
def test_a_class_name_used_twice_is_found(
    checkout: Path, one: str, other: str, room: str, code: str, name: str
) -> None:
    write(checkout, one, code.format(name))
    write(checkout, other, code.format(name))
    assert faults(checkout) == [f"{room}: {one} and {other} define a class {name}; rename one"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("services/ledger/a.py", "services/cursor/a.py"),
        ("services/ledger/a.py", "services/runtime/a.py"),
        ("services/errors.py", "services/extra.py"),
        ("seqgate/keys.py", "seqgate/client/_a.py"),
        ("tools/bench/a.py", "tools/demo/a.py"),
    ],
)
def test_a_name_in_two_rooms_passes(checkout: Path, one: str, other: str) -> None:
    write(checkout, one, "class Share: ...")
    write(checkout, other, "class Share: ...")
    assert faults(checkout) == []


def test_a_name_twice_in_one_module_passes(checkout: Path) -> None:
    write(checkout, "tools/dev/a.py", "if x:\n    class A: ...\nelse:\n    class A: ...")
    assert faults(checkout) == []


def test_make_lint_runs_the_check(root: Path) -> None:
    assert "-m tools.dev.names\n" in (root / "Makefile").read_text()
