"""Which files run first and last, and which stay together. It is for time alone: no test depends on it."""

from pathlib import Path

_HERE = Path(__file__).parent
# Real jobs, in the order that lets two of them start up side by side.
_JOBS = ("e2e/test_alone_and_resumed.py", "e2e/test_multiplexed_run.py", "e2e/test_stock_mode.py")
# Ten seconds and more, the longest first: a worker that gets one of them last ends long after the others.
_LONG = (
    "launcher/test_survival.py",
    "warm/test_fork_server.py",
    "packaging/test_wheel.py",
    "bench/chaos/test_kills.py",
    "config/test_main_ppo.py",
    "test_plugin.py",
    "upstream/test_upstream.py",
    "coordinator/test_restart.py",
    "coordinator/test_process_watch.py",
    "agent/test_another_host.py",
    "bench/test_filler.py",
    "sync/test_killed.py",
    "launcher/test_doctor.py",
    "test_hold.py",
    "examples/test_filler.py",
    "profiling/report/findings/test_blind_runs.py",
    "rollout/engine/sglang/test_scheduler_memory.py",
    "rollout/engine/sglang/test_server.py",
    "gpu/test_scenes.py",
    "launcher/test_plan_command.py",
    "recipes/test_two_7b_grpo.py",
    "bench/chaos/test_schedule.py",
    "bench/test_sync.py",
    "sync/test_export.py",
    "trainer/test_fsdp_states.py",
    "agent/test_hosts.py",
    "bench/test_every_bench.py",
    "bench/chaos/test_simulated.py",
    "research/test_command.py",
)
# Of real jobs that have started up beside all that comes before.
_LAST = ("e2e/test_rollout_control.py", "e2e/test_event_log.py", "e2e/test_megatron.py")
# What these share is started once. `place` has them in an order in which one shared thing starts up beside another's work.
_TOGETHER = {
    "jobs": (*_JOBS, *_LAST[:2]),
    "forks": (
        "bench/test_memory_cycles.py",
        "gpu/test_turns.py",
        "trainer/test_job_hosts.py",
        "places/test_two_ray_nodes.py",
        "warm/test_fork_server.py",
    ),
}
GROUPS = {_HERE / name: group for group, names in _TOGETHER.items() for name in names}
PLACES = {_HERE / name: at for at, name in enumerate((*_JOBS, *_LONG), -len(_JOBS + _LONG))}
PLACES |= {_HERE / name: at for at, name in enumerate(_LAST, 1)}


def place(path: Path) -> int:
    """The file's place: below 0 the first ones, above 0 the last, 0 all others."""
    return PLACES.get(path, 0)


def group(path: Path) -> str:
    """Files of one group run on the same worker; most are a group of their own."""
    return GROUPS.get(path, str(path))
