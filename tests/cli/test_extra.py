"""The command `seqgate` without the extra `cli`."""

import sys

import pytest

from seqgate.cli import main
from seqgate.extras import pip_install


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_extra_names_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    for module in list(sys.modules):
        if module.startswith(("seqgate.cli._", f"{missing}.")):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)

    assert main() == 2

    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.endswith(f": {pip_install('cli')}\n")


def test_a_missing_module_of_the_package_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "seqgate.cli._main", None)
    with pytest.raises(ModuleNotFoundError):
        main()
