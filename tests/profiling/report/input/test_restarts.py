"""Two runs in one folder whose lines do not say which is which, and two hosts' folders of one run."""

from datetime import timedelta

from tests.profiling import documented
from tests.profiling.documented import Documented
from tests.profiling.made_logs import read_run
from verl_mux.profiling.plain.lines import find_log_files
from verl_mux.profiling.report.input.restarts import sorted_out
from verl_mux.profiling.report.measures.analysis import Analysis
from verl_mux.profiling.report.output.summary import summarise


def appended(folder, monkeypatch, hours: float, **second):
    """A second run's lines behind the first one's, as a restarted job writes them."""
    Documented(steps=4).write(folder)
    with monkeypatch.context() as patched:
        patched.setattr(documented, "EPOCH", documented.EPOCH + timedelta(hours=hours))
        other = Documented(steps=4, seed=1, **second).write(folder.parent / f"{folder.name} again")
    for file in other.rglob("*.jsonl"):
        with (folder / file.relative_to(other)).open("a") as lines:
            lines.write(file.read_text())
    return folder


def test_a_step_that_comes_again_after_later_ones_is_another_run(tmp_path, monkeypatch):
    folder = appended(tmp_path / "both", monkeypatch, 5.0, slow={(2, step): 2.5 for step in range(1, 5)})
    report = summarise(Analysis(read_run(folder)))
    assert (report["steps"], report["requests"]) == (8, 2 * 4 * 128)
    assert [(it["kind"], it["job"], it["replica"]) for it in report["findings"]] == [("straggler", "(run 2)", 2)]
    assert report["completion"]["total"] < 150


def test_a_run_that_went_on_has_begun_once(tmp_path):
    files = find_log_files(Documented(carried=0.25).write(tmp_path))
    assert sorted_out(files) == (files, {})


def test_two_hosts_folders_are_one_job(tmp_path):
    log = Documented(slow={(2, step): 2.5 for step in range(1, 7)}, shift={("server", 2): 180.0, ("server", 3): 180.0})
    whole = log.write(tmp_path / "whole")
    for file in whole.rglob("*.jsonl"):
        number = int(file.stem.removeprefix("worker_"))
        other = number >= (4 if "rollout" in file.parts else 2)
        place = tmp_path / "both" / ("host1" if other else "host0") / file.relative_to(whole)
        place.parent.mkdir(parents=True, exist_ok=True)
        file.rename(place)
    report = summarise(Analysis(read_run(tmp_path / "both")))
    assert [(it["kind"], it["job"], it["replica"]) for it in report["findings"]] == [("straggler", "", 2)]
    assert (report["steps"], report["workers"]) == (6, 8)


def test_two_jobs_side_by_side_stay_two(tmp_path):
    for job in ("a", "b"):
        Documented(steps=3).write(tmp_path / job)
    assert {file.job for file in sorted_out(find_log_files(tmp_path))[0]} == {"a", "b"}
