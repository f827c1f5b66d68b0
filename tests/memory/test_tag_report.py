import multiprocessing

import pytest

from verl_mux.memory.tag_report import DIRECTORY_VARIABLE, mapped_bytes, write


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    return tmp_path


def test_what_is_written_is_read_back(directory):
    write({"weights": 3 << 40}, pid=7)
    assert mapped_bytes(directory) == {"weights": 3 << 40}


def test_a_process_replaces_its_own_report_and_no_other(directory):
    write({"weights": 10}, pid=1)
    write({"weights": 5, "kv_cache": 1}, pid=2)
    write({"weights": 0}, pid=1)
    assert mapped_bytes(directory) == {"weights": 5, "kv_cache": 1}


def test_where_no_server_asks_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    write({"weights": 10}, pid=1)
    assert not list(tmp_path.iterdir())


def test_no_reports_are_no_bytes(tmp_path):
    assert mapped_bytes(tmp_path) == {}


def _write_many(pid: int) -> None:
    for count in range(200):
        write({"weights": count}, pid=pid)


def test_a_reader_never_sees_half_a_report(directory):
    writer = multiprocessing.get_context("fork").Process(target=_write_many, args=(3,))
    writer.start()
    while writer.is_alive():
        assert mapped_bytes(directory).get("weights", 0) < 200
    writer.join()
    assert mapped_bytes(directory) == {"weights": 199}
