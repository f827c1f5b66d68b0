import pytest

from verl_mux.errors import UserError
from verl_mux.launcher.folders import make_folder, make_room, watched
from verl_mux.launcher.run_file import JobSpec, RunFile

NODES = {"rollout": ["r0"], "train": ["t0"]}


def made(directory, *jobs, **keys) -> RunFile:
    specs = {name: JobSpec(nodes=NODES) for name in jobs or ["math"]}
    return RunFile(dir=str(directory), coordinator={}, jobs=specs, **keys)


def write(path, text="old"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def earlier(directory):
    return sorted((directory / "earlier").iterdir()) if (directory / "earlier").exists() else []


def test_what_an_earlier_run_left_moves_away_whole_and_the_rest_stays(tmp_path):
    make_room(made(tmp_path, "math", "code"))
    for name in ("math/checkpoints/global_step_4/model.pt", "code/job.log", "coordinator/journal", "summary.json"):
        write(tmp_path / name)
    write(tmp_path / "assets/train.parquet")
    make_room(made(tmp_path, "math"))
    (kept,) = earlier(tmp_path)
    for name in ("math/checkpoints/global_step_4/model.pt", "code/job.log", "coordinator/journal", "summary.json"):
        assert (kept / name).read_text() == "old"
    assert not any((tmp_path / "math").glob("[!.]*")) and not (tmp_path / "summary.json").exists()
    assert (tmp_path / "assets/train.parquet").exists()


def test_runs_that_end_in_one_second_do_not_mix(tmp_path):
    for text in ("first", "second", "third"):
        make_room(made(tmp_path))
        write(tmp_path / "math/job.log", text)
    make_room(made(tmp_path))
    assert sorted((kept / "math/job.log").read_text() for kept in earlier(tmp_path) if (kept / "math/job.log").exists()) == [
        "first", "second", "third",
    ]  # fmt: skip


def test_a_run_that_resumes_keeps_its_jobs_in_place_and_begins_with_a_new_journal(tmp_path):
    make_room(made(tmp_path))
    for name in ("math/checkpoints/step", "coordinator/journal", "coordinator/events/coordinator/x.jsonl", "summary.json"):
        write(tmp_path / name)
    make_room(made(tmp_path, resume=True))
    for name in ("math/checkpoints/step", "coordinator/events/coordinator/x.jsonl"):
        assert (tmp_path / name).exists()
    (kept,) = earlier(tmp_path)
    for name in ("coordinator/journal", "summary.json"):
        assert (kept / name).exists() and not (tmp_path / name).exists()


def test_a_folder_that_no_run_made_is_refused_and_left_as_it_is(tmp_path):
    write(tmp_path / "math/thesis.tex", "mine")
    for make in (lambda: make_room(made(tmp_path)), lambda: make_folder(tmp_path, "math")):
        with pytest.raises(UserError, match="math exists and was not made by verl-mux run"):
            make()
    assert (tmp_path / "math/thesis.tex").read_text() == "mine"
    assert not (tmp_path / "coordinator").exists() and not earlier(tmp_path)


def test_one_folder_alone_is_made_anew_beside_others(tmp_path):
    for name in ("sync_1", "sync_2", "sync_1"):
        make_folder(tmp_path, name)
        write(tmp_path / name / "job.log")
    (kept,) = earlier(tmp_path)
    assert (kept / "sync_1/job.log").exists() and (tmp_path / "sync_2/job.log").exists()


def test_a_file_is_no_folder_for_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="cannot make the folder .*file: File exists; choose another `dir`"),
        watched(tmp_path / "file"),
    ):
        pass
