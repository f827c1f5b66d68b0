"""What a GPU test measured is one line of JSON, with its outcome."""

import json

pytest_plugins = "pytester"


def test_each_test_marked_gpu_leaves_a_line_with_its_figures_and_its_outcome(pytester, monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_MUX_GPU_RECORD", str(tmp_path / "made" / "record.jsonl"))
    pytester.makeconftest("from tests.gpu.conftest import pytest_runtest_makereport")
    pytester.makepyfile(
        """
        import pytest
        from tests.gpu import record

        @pytest.mark.gpu
        def test_good():
            for _ in range(2):
                with record.timed("sleep"):
                    pass
            record.note(held_bytes=[7])

        def test_of_no_gpu():
            record.note(held_bytes=8)

        @pytest.mark.gpu
        def test_bad():
            assert False

        @pytest.mark.gpu
        def test_left_out():
            pytest.skip("one GPU")
        """
    )
    pytester.runpytest("--strict-markers", "-o", "markers=gpu").assert_outcomes(passed=2, failed=1, skipped=1)
    lines = [json.loads(line) for line in (tmp_path / "made" / "record.jsonl").read_text().splitlines()]
    assert [(line["test"].rpartition("::")[2], line["outcome"]) for line in lines] == [
        ("test_good", "passed"), ("test_bad", "failed"), ("test_left_out", "skipped"),
    ]  # fmt: skip
    assert len(lines[0]["figures"]["sleep_s"]) == 2 and lines[0]["figures"]["held_bytes"] == [[7]]
    assert not lines[1]["figures"]
