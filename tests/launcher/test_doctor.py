"""`verl-mux doctor`: one line a check, the same as JSON, and an exit code that says whether the demo could run."""

import importlib.util
import json
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from verl_mux.errors import Failure, UserError
from verl_mux.launcher import doctor
from verl_mux.launcher.doctor import Check
from verl_mux.platform.host_memory import Room

GOOD, NOTE, BAD = Check("one", True, "fine"), Check("two", None, "so so", "read this"), Check("three", False, "gone", "do that")


@pytest.fixture
def checks(monkeypatch):
    """Let doctor find exactly these."""
    return lambda *found: monkeypatch.setattr(doctor, "run_checks", lambda coordinator=None: iter(found))


def test_each_check_is_a_line_with_advice_on_what_is_not_good(checks, capsys):
    checks(GOOD, NOTE)
    doctor.doctor()
    assert capsys.readouterr().out.splitlines() == ["ok   one: fine", "note two: so so; read this"]


def test_something_bad_fails_by_name_and_the_json_says_the_same(checks, capsys):
    checks(GOOD, BAD, NOTE)
    for as_json in (False, True):
        with pytest.raises(Failure, match="the demo could not run here: three"):
            doctor.doctor(as_json=as_json)
    lines, _, printed = capsys.readouterr().out.partition("{")
    assert "bad  three: gone; do that" in lines
    found = json.loads("{" + printed)
    assert found["ok"] is False and [check["ok"] for check in found["checks"]] == [True, False, None]
    assert found["checks"][0] == {"name": "one", "ok": True, "found": "fine", "advice": ""}
    checks(GOOD, NOTE)
    doctor.doctor(as_json=True)
    assert json.loads(capsys.readouterr().out)["ok"] is True


class TestChecks:
    def test_versions(self, monkeypatch):
        found = psutil.__version__
        missing, old = doctor._version("no-such-package", "1.2", ""), doctor._version("psutil", "0.1", "<0.2")
        assert missing.ok is False and "install no-such-package==1.2" in missing.advice
        assert doctor._version("psutil", found, "").ok is True
        assert doctor._version("psutil", "0.1", "") == Check("psutil", None, found, "tested with 0.1; run tests/upstream")
        assert old.ok is False and old.found == f"{found} (supported: <0.2)" and "untried: install psutil<0.2" in old.advice
        monkeypatch.setenv(doctor.ANY_VERSION, "1")
        assert doctor._version("psutil", "0.1", "<0.2").ok is None

    def test_an_engine_that_is_not_in_this_environment_is_named_and_nothing_is_wrong(self, monkeypatch):
        monkeypatch.setattr(doctor, "_plugin", lambda: GOOD)
        here = {engine.name for engine in doctor.installed()}
        absent = [check for check in doctor.run_checks() if check.found == "not in this environment"]
        assert {check.name for check in absent} == set(doctor.engines()) - here and all(check.ok for check in absent)

    @pytest.mark.parametrize(("wanted", "ok"), [(0, True), (1 << 40, False)])
    def test_space_is_measured_where_it_is_needed(self, tmp_path, wanted, ok):
        check = doctor._space(str(tmp_path), wanted, "free some")
        assert check.ok is ok and "GiB free" in check.found and check.advice == ("" if ok else "free some")
        assert doctor._space(str(tmp_path / "none"), 0, "make it").ok is False

    @pytest.mark.parametrize(("free", "cores", "ok"), [(64 << 30, {0, 1}, (True, True)), (1 << 30, {0}, (False, None))])
    def test_host_memory_and_cores(self, monkeypatch, free, cores, ok):
        monkeypatch.setattr(doctor, "room", lambda: Room(2 * free, free, "/sys/fs/cgroup/job"))
        monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda pid: cores)
        monkeypatch.setattr(doctor, "_plugin", lambda: GOOD)
        checks = {check.name: check for check in doctor.run_checks()}
        assert (checks["host memory"].ok, checks["cores"].ok) == ok
        assert checks["host memory"].found.endswith(" GiB free of /sys/fs/cgroup/job")

    @pytest.mark.parametrize(
        ("accelerator", "variable", "ok", "word"),
        [(False, None, True, "CPU platform"), (True, "cpu", None, "on a machine with an accelerator")],
    )
    def test_the_platform_and_what_is_odd_about_it(self, monkeypatch, accelerator, variable, ok, word):
        monkeypatch.setattr(doctor, "accelerator_present", lambda: accelerator)
        monkeypatch.delenv("VERL_PLATFORM", raising=False)
        if variable:
            monkeypatch.setenv("VERL_PLATFORM", variable)
        check = doctor._platform()
        assert check.ok is ok and word in check.found

    def test_a_host_whose_name_leads_nowhere(self, monkeypatch):
        monkeypatch.setattr(doctor.socket, "gethostname", lambda: "no-such-host.invalid")
        check = doctor._ports()
        assert check.ok is False and "/etc/hosts" in check.advice


class TestJobs:
    """What of a config is refused or changed: tests/config/test_completion.py."""

    @pytest.fixture
    def file(self, tmp_path):
        """Writes verl's own composed config, with these values in it."""
        spec = importlib.util.find_spec("verl") or pytest.skip("needs verl")
        whole = Path(spec.submodule_search_locations[0], "trainer", "config", "_generated_ppo_trainer.yaml")

        def write(**values):
            config = OmegaConf.load(whole)
            OmegaConf.update(config, "actor_rollout_ref.model.path", str(tmp_path))
            for key, value in {"actor_rollout_ref__rollout__name": "sglang", **values}.items():
                OmegaConf.update(config, key.replace("__", "."), value)
            path = tmp_path / "composed.yaml"
            path.write_text(OmegaConf.to_yaml(config))
            return path

        return write

    def test_a_job_that_would_start_is_a_line_a_key(self, file, capsys):
        doctor.doctor(job=file(trainer__nnodes=2))
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == "accepted"
        assert {"changed  actor_rollout_ref.actor.strategy: fsdp -> fsdp2 (verl_mux sets it)",
                "changed  trainer.v1.trainer_mode: sync -> mux_separate (you set it)",
                "untried  trainer.nnodes=2: more than one ran on hosts made of network namespaces alone"} <= {*lines}  # fmt: skip

    def test_a_job_that_would_not_start_fails_by_all_keys(self, file, capsys):
        given = file(trainer__use_v1=False, actor_rollout_ref__rollout__quantization="fp8")
        for as_json in (False, True):
            with pytest.raises(Failure, match=r"refused: actor_rollout_ref.rollout.quantization, trainer.use_v1"):
                doctor.doctor(job=given, as_json=as_json)
        lines, _, printed = capsys.readouterr().out.partition("\n{")
        assert "refused  trainer.use_v1: trainer.use_v1=False starts verl's legacy trainer" in lines
        found = json.loads("{" + printed)
        assert {key: type(value) for key, value in found.items()} == {
            "accepted": bool, "refusals": list, "changes": list, "untried": list
        }  # fmt: skip
        assert [{*entry} for entry in found["refusals"]] == [{"key", "given", "reason"}] * 2

    @pytest.mark.parametrize(
        ("command", "text", "said"),
        [
            (None, "- a", "composed.yaml is no composed verl config: "),
            (None, "a: [", "composed.yaml is not YAML"),
            (None, "trainer: {}", "composed.yaml is no whole config of verl's: data is None"),
            (["python", "train.py"], None, "python train.py: only `python -m verl.trainer.main_ppo OVERRIDES` is composed here"),
            (["python"], "a: 1", "give either --job FILE or a command"),
        ],
    )
    def test_what_cannot_be_judged_is_one_line(self, tmp_path, command, text, said):
        job = tmp_path / "composed.yaml"
        if text is not None:
            job.write_text(text)
        with pytest.raises(UserError) as error:
            doctor.doctor(command, job=None if text is None else job)
        assert said in str(error.value) and "\n" not in str(error.value)

    def test_a_command_is_composed_and_not_started(self, python, tmp_path):
        pytest.importorskip("verl")
        command = ("-m", "verl_mux", "doctor", "--json", "--", "python3", "-m", "verl.trainer.main_ppo")
        words = ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.model.path=/nowhere", "algorithm.adv_estimator=rloo")
        judged = python(*command, *words, cwd=tmp_path, timeout=300)
        assert (judged.returncode, json.loads(judged.stdout)["accepted"]) == (0, True), judged.stderr
        wrong = python(*command, "algorithm.adv=grpo", cwd=tmp_path, timeout=300)
        said = "verl-mux: the command's config cannot be composed: Could not override 'algorithm.adv'."
        assert (wrong.returncode, wrong.stderr.splitlines()) == (2, [said])
        assert list(tmp_path.iterdir()) == []


def test_a_plugin_that_verl_did_not_load_is_found_through_the_command_line(python):
    # verl itself says nothing about it: it would only not know our trainer modes.
    result = python("-m", "verl_mux", "doctor", "--json", timeout=300, VERL_USE_EXTERNAL_PLUGINS="none")
    printed = json.loads(result.stdout)
    plugin = next(check for check in printed["checks"] if check["name"] == "plugin")
    assert plugin["ok"] is False and "reinstall verl-mux" in plugin["advice"]
    assert (printed["ok"], result.returncode) == (False, 1)
    assert result.stderr.startswith("verl-mux: the demo could not run here: ") and "plugin" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_option_is_a_usage_error(python):
    result = python("-m", "verl_mux", "doctor", "--jason")
    assert result.returncode == 2 and "--jason" in result.stderr and "Traceback" not in result.stderr
