import multiprocessing

import pytest

from verl_mux.memory.tag_report import DIRECTORY_VARIABLE, TagReport, mapped_bytes, read_reports


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    return tmp_path


def test_what_is_written_is_read_back(directory):
    report = TagReport(pid=7, mapped={"weights": 3 << 40}, seconds={"weights": 0.25})
    report.write()
    assert read_reports(directory) == [report]


def test_a_process_replaces_its_own_report_and_no_other(directory):
    TagReport(pid=1, mapped={"weights": 10}).write()
    TagReport(pid=2, mapped={"weights": 5, "kv_cache": 1}).write()
    TagReport(pid=1, mapped={"weights": 0}).write()
    assert mapped_bytes(read_reports(directory)) == {"weights": 5, "kv_cache": 1}


def test_where_no_server_asks_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    TagReport(pid=1, mapped={"weights": 10}).write()
    assert not list(tmp_path.iterdir())


def test_no_reports_are_no_bytes(tmp_path):
    assert mapped_bytes(read_reports(tmp_path)) == {}


def _write_many(pid: int) -> None:
    for count in range(200):
        TagReport(pid=pid, mapped={"weights": count}).write()


def test_a_reader_never_sees_half_a_report(directory):
    writer = multiprocessing.get_context("fork").Process(target=_write_many, args=(3,))
    writer.start()
    while writer.is_alive():
        assert all(report.mapped["weights"] < 200 for report in read_reports(directory))
    writer.join()
    assert mapped_bytes(read_reports(directory)) == {"weights": 199}
