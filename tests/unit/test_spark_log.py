"""The file with what Spark writes: when it is kept, and which errors name it."""

import logging
from pathlib import Path

import pytest

from seqgate.errors import SeqgateError
from seqgate.jobs.spark_log import SUBMITTED, VARIABLE, spark_log


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(SUBMITTED, raising=False)
    return tmp_path


def test_a_temporary_log_is_deleted_after_success(folder: Path) -> None:
    with spark_log(None) as log:
        assert log.path is not None
        logging.getLogger("pyspark").warning("lost a task")
        assert log.path.read_text() == "lost a task\n"
    assert list(folder.iterdir()) == []


def test_an_error_names_a_log_that_is_not_empty(folder: Path) -> None:
    with pytest.raises(SeqgateError) as caught, spark_log(None):
        raise SeqgateError("early", details={"a": "b"})
    assert caught.value.details == {"a": "b"}
    assert list(folder.iterdir()) == []

    with pytest.raises(SeqgateError) as caught, spark_log(None) as log:
        raise SeqgateError("late", details=log.failed(ValueError("in full")))
    assert Path(caught.value.details["log"]).read_text() == "in full\n"


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_log_that_was_asked_for_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    file = folder / "spark.log"
    file.write_text("before\n")
    if by_variable:
        monkeypatch.setenv(VARIABLE, str(file))
    with spark_log(None if by_variable else file) as log:
        assert log.path == file
    assert file.read_text() == "before\n"


def test_under_spark_submit_the_caller_has_the_output(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SUBMITTED, "1")
    with spark_log(None) as log:
        assert (log.path, log.failed(ValueError("in full"))) == (None, {})
    assert capsys.readouterr().err == "in full\n"
    assert list(folder.iterdir()) == []
