import pytest

from verl_mux.platform import choose

MODE = ["main_ppo.py", "trainer.v1.trainer_mode=mux_separate"]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with or without an accelerator's device file, and without VERL_PLATFORM."""
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))

    def made(accelerator: bool) -> None:
        device = tmp_path / "nvidiactl"
        if accelerator:
            device.touch()
        monkeypatch.setattr(choose, "_DEVICE_FILES", (str(device), str(tmp_path / "kfd")))

    return made


@pytest.mark.parametrize(
    ("variable", "argv", "accelerator", "wanted"),
    [
        (None, MODE, False, True),
        (None, ["main_ppo.py", "++trainer.v1.trainer_mode=mux_colocate"], False, True),
        (None, ["main_ppo.py", "--config-name", "mux_ppo_trainer"], False, True),
        (None, MODE, True, False),
        (None, ["main_ppo.py", "trainer.v1.trainer_mode=sync"], False, False),
        (None, ["main_ppo.py", "+mux=default", "mux.profile.enable=true"], False, False),
        (None, [], False, False),
        ("cpu", [], False, True),
        ("cpu", [], True, True),
        (" CPU ", [], True, True),
        ("nvidia", MODE, False, False),
        ("", MODE, False, True),
        (None, [*MODE, "+ray_kwargs.ray_init.address=10.0.0.1:6379"], False, False),
        ("cpu", [*MODE, "+ray_kwargs.ray_init.address=10.0.0.1:6379"], False, True),
    ],
)
def test_the_cpu_platform_is_taken_when_asked_for_or_for_our_modes_where_there_is_nothing_else(
    machine, monkeypatch, variable, argv, accelerator, wanted
):
    machine(accelerator)
    if variable is not None:
        monkeypatch.setenv("VERL_PLATFORM", variable)
    assert choose.cpu_platform_wanted(argv) is wanted


@pytest.mark.parametrize(
    ("variable", "argument", "wanted"),
    [
        (None, None, False), ("auto", None, False), ("local", None, True), (None, "local", True), ("local", "null", True),
        ("10.0.0.1:6379", None, False),  # the head node of a cluster says nothing about its accelerators
    ],
)  # fmt: skip
def test_a_cluster_that_was_started_here_is_joined_unless_the_job_has_one_of_its_own(
    machine, monkeypatch, tmp_path, variable, argument, wanted
):
    machine(False)
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    words = [] if argument is None else [f"+ray_kwargs.ray_init.address={argument}"]
    assert choose.cpu_platform_wanted([*MODE, *words]) is wanted


def test_one_device_file_is_an_accelerator(machine):
    machine(False)
    assert not choose.accelerator_present()
    machine(True)
    assert choose.accelerator_present()
