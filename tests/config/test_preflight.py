"""Bad keys end a job before Ray starts: one line on stderr, exit code 2, and verl's own checks never run."""

import socket

import pytest

pytest.importorskip("verl")
from omegaconf import OmegaConf

from tests.config.test_schema import verl_config
from verl_mux.config import preflight
from verl_mux.config.job_checks import load
from verl_mux.config.validation_hook import checked_first
from verl_mux.coordinator.bus.client import LocalMux
from verl_mux.coordinator.bus.members import UID_VARIABLE
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.server import Coordinator

POOLS = {"rollout": {"nodes": [{"name": "r0", "gpus": 8}]}, "train": {"nodes": [{"name": "t0", "gpus": 8}]}}
NODES = {"rollout": ["r0"], "train": ["t0"]}


@pytest.fixture
def coordinator():
    served = Coordinator(make_config({"pools": POOLS}))
    served.start()
    yield served
    served.stop()


@pytest.fixture
def check(monkeypatch, tmp_path):
    """Runs our preflight before a stand-in of verl's validation; says whether that was reached."""
    monkeypatch.delenv(UID_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    reached = []

    def run(config) -> bool:
        checked_first(lambda config, *args, **kwargs: reached.append(config))(config)
        return reached[-1:] == [config]

    return run


def job(address: str | None, **mux):
    config = verl_config({"coordinator": address, "nodes": NODES, **mux})
    config.trainer.total_training_steps = 3
    config.trainer.default_local_dir = "checkpoints/exp"
    return config


def refusal(check, config, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        check(config)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("verl-mux: ")
    return line


def test_a_job_that_the_coordinator_would_take_goes_on_to_verls_own_checks(check, coordinator):
    assert check(job(coordinator.address))


def test_a_ray_of_the_jobs_own_offers_the_nodes_of_this_machine_and_no_other(check, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    pools = {"rollout": {"nodes": [{"name": "r0", "gpus": 8, "host": socket.gethostname()}]},
             "train": {"nodes": [{"name": "t0", "gpus": 8, "host": "elsewhere"}]}}  # fmt: skip
    with Coordinator(make_config({"pools": pools})) as bound:
        config = job(bound.address)
        config.ray_kwargs = {"ray_init": {"num_cpus": 4}}
        assert check(config) and config.ray_kwargs.ray_init == {"num_cpus": 4, "resources": {"mux_r0": 1}}
        # A cluster that is there already offers what it was started with. This one is gone, and Ray looks for it for a second.
        monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "1")
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        joining = job(bound.address)
        assert check(joining) and "ray_kwargs" not in joining


def test_asking_leaves_no_job_behind(check, coordinator):
    assert check(job(coordinator.address))
    assert [j for j in coordinator.snapshot()["jobs"].values() if j["state"] == "live"] == []


def test_without_a_coordinator_nobody_is_asked(check):
    assert check(job(None))


@pytest.mark.parametrize(
    ("mux", "words"),
    [
        ({"nodes": {"rollout": ["r7"], "train": ["t0"]}}, ["'r7'", "no pool or node", "rollout (r0), train (t0)"]),
        ({"seeed": 1}, ["unknown key mux.seeed", "seeded_sampling"]),
        ({"coordinator": "localhost"}, ["localhost"]),
        ({"coordinator": "5570"}, ["5570"]),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(check, coordinator, capsys, mux, words):
    text = refusal(check, job(coordinator.address, **mux), capsys)
    assert all(word in text for word in words), text


def test_a_coordinator_that_does_not_answer(check, capsys, monkeypatch):
    monkeypatch.setattr(preflight, "_TIMEOUT_S", 1)
    text = refusal(check, job("tcp://127.0.0.1:1"), capsys)
    assert "tcp://127.0.0.1:1" in text and "1 s" in text


def test_more_gpus_than_the_node_has(check, coordinator, capsys):
    config = job(coordinator.address)
    config.actor_rollout_ref.rollout.n_gpus_per_node = 16
    text = refusal(check, config, capsys)
    assert "16 GPUs" in text and "'r0'" in text and "8" in text


def test_two_jobs_of_one_name(check, coordinator, capsys, monkeypatch):
    from verl_mux.coordinator.bus.client import connect

    first = connect(coordinator.address, "exp", NODES, uid="exp:first", timeout=20)
    try:
        text = refusal(check, job(coordinator.address), capsys)
        assert "'exp' is running" in text and "unique" in text
    finally:
        first.close()


def test_a_stock_mode_is_none_of_our_business(check):
    config = verl_config(None, trainer__v1__trainer_mode="sync")
    before = config.copy()
    assert check(config) and config == before


def test_a_second_job_does_not_go_on_from_the_first_ones_checkpoints(check, capsys, tmp_path):
    assert check(job(None, job="math"))
    assert "holds the checkpoints of job 'math'" in (line := refusal(check, job(None, job="code"), capsys))
    assert "trainer.experiment_name" in line and str(tmp_path / "") not in line  # as it was given


def test_a_job_goes_on_from_its_own_checkpoints(check):
    assert check(job(None, job="math")) and check(job(None, job="math"))


def test_a_folder_that_cannot_be_written_is_told(check, capsys, tmp_path):
    (tmp_path / "checkpoints").touch()
    assert "trainer.default_local_dir=checkpoints/" in refusal(check, job(None), capsys)


@pytest.mark.parametrize(
    ("nodes", "note", "save_freq", "in_background", "movable"),
    [
        ("auto", True, 5, False, True),
        ("auto", False, 5, False, False),  # nobody starts it again
        ("auto", True, -1, False, False),  # it keeps no checkpoints
        ("auto", True, 5, True, False),  # they are not whole when it ends
        (NODES, True, 5, False, True),
    ],
)
def test_a_job_says_that_it_may_be_moved_where_somebody_starts_it_again(
    monkeypatch, tmp_path, nodes, note, save_freq, in_background, movable
):
    told = {}
    monkeypatch.setattr(preflight, "connect", lambda *_, **keys: told.update(keys) or LocalMux("a", {}))
    monkeypatch.setattr(preflight, "needs_of", lambda config: None)
    config = job(None, nodes=nodes, move_note=str(tmp_path / "note") if note else None)
    config.mux.coordinator = None
    config.trainer.save_freq = save_freq
    OmegaConf.update(config, "actor_rollout_ref.actor.checkpoint.async_save", in_background, force_add=True)
    mux = load_with_any_nodes(config)
    preflight.connect_job(config, mux)
    assert told["movable"] is movable and told["colocated"] is False


def test_a_colocated_job_says_so(monkeypatch):
    told = {}
    for tells in ("needs_of", "host_memory_of"):
        monkeypatch.setattr(preflight, tells, lambda config: None)
    config = job(None, nodes="auto")
    config.trainer.v1.trainer_mode = "mux_colocate"
    config.trainer.nnodes = 1
    config.mux.coordinator = "tcp://127.0.0.1:1"
    mux = load(config)
    given = {"rollout": ["t0"], "train": ["t0"]}
    monkeypatch.setattr(preflight, "connect", lambda *_, **keys: told.update(keys) or LocalMux("a", given))
    preflight.connect_job(config, mux)
    assert told["colocated"] is True


def load_with_any_nodes(config):
    """Without a coordinator `auto` would be refused; here its client is a stand-in."""
    config.mux.coordinator = "tcp://127.0.0.1:1"
    mux = load(config)
    mux.coordinator = None
    return mux


def test_a_job_that_starts_has_not_left_to_move(check, coordinator, tmp_path):
    note = tmp_path / "left_to_move"
    note.touch()
    assert check(job(coordinator.address, move_note=str(note)))
    assert not note.exists()
