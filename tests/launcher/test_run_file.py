"""Every refusal is one line that names the file, the key, what was given and what is allowed."""

import re
import sys
from pathlib import Path

import pytest

from verl_mux.errors import UserError
from verl_mux.launcher import plan_jobs, run_file

DOCS = Path(__file__).parents[2] / "docs"

VALID = """
dir: runs/x
coordinator:
  pools:
    rollout: {nodes: [{name: r0, gpus: 8}, {name: r1, gpus: 4}]}
    train: {nodes: [{name: t0}]}
jobs:
  math: {nodes: {rollout: [r0], train: [t0]}, gpus: {rollout: 8}, seed: 3, overrides: ["data.seed={seed}"]}
  code-7b.v2: {nodes: {rollout: [r0, r1], train: [t0]}, gpus: {rollout: 4, train: 1}}
"""
FILLED = VALID + "fillers:\n  sums: {pool: train, command: [python, train.py], grace: 1}\n"
PLACED = """
dir: runs/x
coordinator:
  pools:
    rollout: {kind: H20, nodes: [{name: r0, gpus: 8}]}
    train: {kind: H800, nodes: [{name: t0, gpus: 8}]}
  placement: scheduler
jobs:
  math: {gpus: {rollout: 8, train: 8}}
  code: {nodes: auto, slo: 1.5, gpus: {rollout: 8, train: 8}}
  late: {after: [math, code]}
"""
REFUSED = {
    VALID: [
        ("dir: runs/x", "", ["dir"]),
        ("dir: runs/x", "dir: runs/x\nworkers: 3", ["workers"]),
        ("seed: 3", "sead: 3", ["line 8", "sead", "jobs.math", "did you mean `seed`?"]),
        ("seed: 3", "seed: three", ["seed", "math"]),
        ("seed: 3", "python: '{here}/no/python'", ["'math'", "python is {here}/no/python", "no program /"]),
        ("seed: 3", "slo: .nan", ["jobs.math.slo", "given: nan", ">= 1"]),
        ("seed: 3", "restarts: -1", ["`int` >= 0", "jobs.math.restarts", "given: -1"]),
        ("dir: runs/x", "dir: runs/x\nbind: tcp://0.0.0.0:5570", ["bind is tcp://0.0.0.0:5570; one address of this machine"]),
        ("gpus: {rollout: 8}", "gpus: {rolout: 8}", ["'rolout'", "allowed: rollout, train"]),
        ("gpus: {rollout: 8}", "gpus: {rollout: 9}", ["'math'", "9 GPUs", "'r0'", "has 8"]),
        ("gpus: {rollout: 8}", "gpus: {rollout: -1}", ["'math'", "-1 GPUs"]),
        ("gpus: {rollout: 4, train: 1}", "gpus: {rollout: 5}", ["5 GPUs", "'r1'", "has 4"]),
        ("rollout: [r0], train: [t0]}", "rollout: [r9], train: [t0]}", ["'r9'", "rollout (r0, r1), train (t0)"]),
        ("rollout: [r0], train: [t0]}", "rollout: [r0]}", ["'math'", "it needs rollout and train"]),
        ("rollout: [r0], train: [t0]}", "rollout: [], train: [t0]}", ["'math'", "each with a node"]),
        ("rollout: [r0], train: [t0]}", "rollout: [r0], train: [t0], sync: [t0]}", ["sync"]),
        ("  code-7b.v2:", "  math:", ["line 9", "'math' stands twice", "unique"]),
        ("  code-7b.v2:", "  ..:", ["'..'", "begins with a letter or digit"]),
        ("  code-7b.v2:", "  ../../home:", ["'../../home'", "letters, digits"]),
        ("  code-7b.v2:", "  /etc:", ["'/etc'"]),
        ("  code-7b.v2:", "  'a,b':", ["'a,b'"]),
        ("  code-7b.v2:", "  coordinator:", ["'coordinator'", "choose another"]),
        ("{name: t0}", "{name: t0, gpu: 1}", ["gpu"]),
        ("{name: t0}", "{name: r0}", ["'r0' is named twice"]),
        ("{name: t0}", "{name: t0, gpus: 1, gpus: 2}", ["'gpus' stands twice"]),
    ],
    FILLED: [
        ("grace: 1", "grace: .nan", ["fillers.sums.grace", "given: nan", ">= 0"]),
        ("grace: 1", "nodes: 0", ["`int` >= 1", "fillers.sums.nodes", "given: 0"]),
        ("pool: train", "pool: trian", ["'sums'", "'trian'", "train (t0)"]),
        ("grace: 1", "graze: 1", ["graze", "fillers.sums", "line 11", "did you mean `grace`?", "allowed: pool, command"]),
        ("  sums:", "  math:", ["'math'", "both a job and a filler"]),
        ("  sums:", "  a/b:", ["filler 'a/b'", "letters, digits"]),
        ("[python, train.py]", "[]", ["of length >= 1", "fillers.sums.command"]),
    ],
    PLACED: [
        ("  placement: scheduler\n", "", ["'math'", "placement: scheduler"]),
        ("after: [math, code]", "after: [missing]", ["'late'", "'missing'", "math, code, late"]),
        ("after: [math, code]", "after: [late]", ["'late'", "its own end"]),
        ("math: {", "math: {after: [late], ", ["'math'", "its own end"]),
        ("nodes: auto", "nodes: any", ["jobs.code.nodes", "given: 'any'; allowed: a mapping, auto"]),
        ("kind: H20, ", "", ["'rollout'", "kind"]),
    ],
}


@pytest.fixture
def write(tmp_path):
    def to_file(text: str):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return to_file


def refusal(path) -> str:
    with pytest.raises(UserError) as error:
        run_file.read(path)
    text = str(error.value)
    assert "\n" not in text and ("run.yaml" in text or "coordinator configuration" in text)
    return text


def test_all_mistakes_of_a_file_are_said_at_once(write):
    wrong = VALID.replace("seed: 3", "sead: 3").replace("gpus: {rollout: 4, train: 1}", "restarts: many").replace("dir:", "dirr:")
    wrong = wrong.replace("{name: t0}", "{name: t0, gpuz: 1}")
    text = refusal(write(wrong))
    for words in (
        "line 2: unknown field `dirr`; did you mean `dir`?",
        "line 8: unknown field `sead`",
        "line 9: Expected `int`, got `str` - at `$.jobs.code-7b.v2.restarts`",
    ):
        assert words in text
    together = refusal(write(VALID.replace("rollout: [r0], train: [t0]}", "rollout: [r9], train: [t8]}, after: [x]", 1)))
    assert all(words in together for words in ("'r9'", "'t8'", "after has 'x'")) and together.count("line 8: ") == 3


def test_a_valid_file_is_read_and_a_directory_given_beside_it_replaces_its_own(write, tmp_path):
    run = run_file.read(write(FILLED), tmp_path / "else")
    assert list(run.jobs) == ["math", "code-7b.v2"] and run.dir == str(tmp_path / "else")
    assert run.jobs["math"].gpus == {"rollout": 8} and run.jobs["math"].seed == 3
    assert run.fillers["sums"].grace == 1 and run.coordinator_config().expect_jobs == 2  # a filler is no job


@pytest.mark.parametrize(("valid", "old", "new", "words"), [(valid, *row) for valid, rows in REFUSED.items() for row in rows])
def test_bad_input_is_refused_by_name(write, valid, old, new, words):
    assert old in valid
    text = refusal(write(valid.replace(old, new, 1)))
    assert all(word in text for word in words), text


def test_jobs_may_leave_their_nodes_to_the_scheduler_and_start_after_others(write):
    run = run_file.read(write(PLACED))
    assert [job.nodes for job in run.jobs.values()] == ["auto"] * 3
    assert run.jobs["code"].slo == 1.5 and run.jobs["late"].after == ["math", "code"]
    config = run.coordinator_config()
    assert config.expect_jobs == 2 and config.placement is not None


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "object"),
        ("- 1\n- 2\n", "object"),
        ("just words", "object"),
        ("dir: [", "not YAML"),
        ("{[1, 2]: 3}", "YAML"),
        (VALID.partition("jobs:")[0] + "jobs: {}", "`jobs` is empty"),
        (VALID.partition("jobs:")[0], "jobs"),
    ],
)
def test_files_that_hold_something_else_are_refused(write, text, word):
    assert word in refusal(write(text))


def test_files_that_cannot_be_read_are_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_bytes(b"dir: \xff\xfe\n")
    assert "not YAML" in refusal(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").unlink()
    (tmp_path / "run.yaml").mkdir()
    assert "Is a directory" in refusal(tmp_path / "run.yaml")


def test_marks_are_filled_in_and_python_is_this_one(write, tmp_path):
    run = run_file.read(write(VALID), tmp_path)
    assert run_file.fill(["python", "make.py", "{dir}/{job}"], run, "math") == [sys.executable, "make.py", f"{tmp_path}/math"]
    assert run_file.fill(["data.seed={seed}", "{other}"], run, "math", 3) == ["data.seed=3", "{other}"]
    assert run_file.fill(["{here}/make.py"], run) == [f"{tmp_path}/make.py"]
    assert run_file.fill([], run) == []


def test_what_a_base_says_holds_too_and_its_lists_come_first(write, tmp_path):
    base = write(VALID + "overrides: [a=1]\nenvironment: {A: '1', B: '2'}\n")
    over = base.with_name("over.yaml")
    over.write_text("base: run.yaml\ndir: runs/y\noverrides: [a=2]\nenvironment: {B: '3'}\njobs: {math: {seed: 4}}\n")
    run, before = run_file.read(over), run_file.read(base)
    assert (run.dir, run.overrides, run.environment) == ("runs/y", ["a=1", "a=2"], {"A": "1", "B": "3"})
    assert run.jobs["math"].seed == 4 and run.jobs["math"].gpus == before.jobs["math"].gpus
    assert run.jobs["code-7b.v2"] == before.jobs["code-7b.v2"] and run.coordinator == before.coordinator
    over.write_text("base: none.yaml\n")
    with pytest.raises(UserError, match="cannot read .*none.yaml"):
        run_file.read(over)


def test_a_jobs_python_is_this_one_or_one_beside_the_file(write, tmp_path):
    other = tmp_path / "bin" / "python"
    other.parent.mkdir()
    other.symlink_to(sys.executable)
    run = run_file.read(write(VALID.replace("seed: 3", "python: '{here}/bin/../bin/python'")))
    found = [run_file.interpreter(job, run) for job in run.jobs.values()]
    assert found == [str(other), sys.executable]  # not what the link names: it is of another environment


# --- what the documents say ---


@pytest.mark.parametrize("kind", [run_file.RunFile, run_file.JobSpec, plan_jobs._Job])
def test_the_reference_has_every_key(kind):
    keys = {key for key in kind.__struct_fields__ if key not in getattr(kind, "INTERNAL", ())}
    rows = [line.split("|")[1] for line in (DOCS / "run_file.md").read_text().splitlines() if line.startswith("| `")]
    assert keys <= set(re.findall(r"`(\w+)`", "".join(rows)))


def test_the_walk_throughs_file_is_a_run_file(write):
    (text,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "walkthrough.md").read_text(), re.DOTALL)
    assert list(run_file.read(write(text)).jobs) == ["low", "high"]
