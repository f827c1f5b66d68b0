"""Jobs that leave their nodes to the coordinator, on a state machine driven by hand."""

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.config import make_config
from verl_mux.coordinator.core.records import Input
from verl_mux.coordinator.core.snapshot import describe
from verl_mux.coordinator.status_view import plain
from verl_mux.placement.estimator import GPU_KINDS, GpuKind, JobNeeds, model_size

MODEL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 1000, "num_attention_heads": 4}
AUTO = {"rollout": [m.AUTO], "train": [m.AUTO]}
# One token a second: a rollout of at most 100 s and a training phase of about as long.
CPU = {"tflops": 1e-3, "tb_per_s": 1e-6, "decode": 1.0, "train": 0.5, "fixed_s": 0.0, "process_gb": 4.0}
GPU_KINDS["cpu"] = GpuKind(**CPU)


def pools(count=1):
    node = {"usd_per_hour": 1.0, "host_bytes": 10**10}
    sides = ("rollout", "train")
    return {side: {"kind": "cpu", "nodes": [{"name": f"{side[0]}{i}", **node} for i in range(count)]} for side in sides}


def placing_config(count=1, **keys):
    return make_config({"pools": pools(count), "placement": {"observe": 2, **keys}})


def needs(**changes):
    given = {"responses": 8, "prompt_tokens": 16, "response_tokens": 100, "rollout_nodes": 1, "rollout_gpus": 1}
    return JobNeeds(**{**given, "train_nodes": 1, "train_gpus": 1, "weight_bytes": 4, "model": model_size(MODEL), **changes})


def arrive(driver, job, **keys):
    return driver.register(job, nodes=AUTO, **{"needs": needs(), **keys})


def step(driver, job, number, rollout=3.0, train=2.0, between=0.0):
    driver.ask(job, "rollout", number, ["r0"])
    driver.now += rollout - 1
    driver.release(job)
    driver.now += between - 1
    driver.ask(job, "train", number, ["t0"])
    driver.now += train - 1
    driver.release(job)


def lines(driver, event):
    return [line.extra for line in driver.logged if line.event == event]


def register(driver, job):
    """The machine alone: the placer thinks."""
    where = {"host": "here", "pid": 7, "started": 1}
    driver.machine.handle(Input(9.0, m.Register(**driver.who(job), nodes=AUTO, needs=needs(), **where)))


def where_told(sent):
    return [message.nodes for message in sent if isinstance(message, m.Registered)]


def shown(driver):
    """The lines of `verl-mux status`."""
    about = {"address": "tcp://here", "journal": {"path": None, "lost": None, "blocked": None}, "settling_s": None}
    return plain({**about, **describe(driver.machine.state, driver.machine.config, driver.now, {})})
