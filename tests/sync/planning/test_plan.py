"""Each way brings everybody everything; what crosses which links is counted; the cheapest is chosen."""

import json
from math import ceil
from pathlib import Path

import pytest

from bench.sync.cases import CASES, FAST_OVER_SLOW, Case
from bench.sync.cases import topology_of as topology_of_case
from verl_mux.errors import UserError
from verl_mux.launcher.plan.command import plan as plan_command
from verl_mux.sync.planning.plan import METHODS, choose, cost, make_plan, possible
from verl_mux.sync.planning.topology import Links, RolloutHost, Topology, Trainer, read_topology

MODEL = 8 << 30


def topology(ranks: int = 2, hosts: int = 2, workers: int = 2, whole: bool = True, clusters: int = 1, **links) -> Topology:
    links = {"slow_gbps": 1.0, "fast_gbps": 20.0, **links}
    trainers = tuple(Trainer(f"t{rank}", "train", 1 / ranks, whole) for rank in range(ranks))
    places = tuple(
        RolloutHost(f"r{at}", f"rollout{at % clusters}", tuple(range(at * workers, (at + 1) * workers))) for at in range(hosts)
    )
    return Topology(trainers, places, Links(**links))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("ranks", "hosts", "workers", "clusters"), [(1, 1, 1, 1), (2, 3, 2, 1), (8, 5, 1, 2), (3, 8, 4, 3)])
def test_every_worker_gets_the_model_exactly_once(method, ranks, hosts, workers, clusters):
    its = topology(ranks, hosts, workers, clusters=clusters)
    plan = make_plan(method, its)
    loads = [worker for sink in plan.sinks for worker in (sink.worker, *sink.readers)]
    assert sorted(loads) == list(range(hosts * workers))
    for at in range(len(plan.sinks)):
        into = [flow for flow in plan.flows if flow.to == at]
        ranks_in = [flow.trainer for flow in into if flow.trainer is not None]
        whole = any(flow.sink is not None or flow.whole for flow in into)
        assert len(into) == 1 if whole else ranks_in == list(range(ranks))


@pytest.mark.parametrize(
    ("method", "copies"), [("pull", 6), ("root", 1), ("chain", 1), ("two_stage", 3), ("relay", 1)]
)  # fmt: skip
def test_copies_over_the_slow_links(method, copies):
    its = topology(4, 3, 2)
    assert cost(make_plan(method, its), its, MODEL).nbytes["slow"] == pytest.approx(copies * MODEL)


def test_a_relay_enters_each_cluster_once():
    its = topology(4, 6, 1, clusters=2)
    assert cost(make_plan("relay", its), its, MODEL).nbytes["slow"] == pytest.approx(2 * MODEL)


def test_seconds_are_those_of_the_busiest_link():
    pairs = topology(8, 8, 1)
    second = 1e9 / 8
    assert cost(make_plan("two_stage", pairs), pairs, MODEL).seconds == pytest.approx(MODEL / 8 / second, rel=0.01)
    assert cost(make_plan("pull", pairs), pairs, MODEL).seconds == pytest.approx(MODEL / second, rel=0.01)
    shared = topology(2, 2, 4, slow_link="shared")
    assert cost(make_plan("two_stage", shared), shared, MODEL).seconds == pytest.approx(2 * MODEL / second, rel=0.01)
    assert cost(make_plan("relay", shared), shared, MODEL).seconds == pytest.approx(MODEL / second, rel=0.01)
    assert cost(make_plan("pull", shared), shared, MODEL).seconds == pytest.approx(8 * MODEL / second, rel=0.01)


@pytest.mark.parametrize(
    ("its", "chosen"),
    [
        # Both as fast: two_stage sends eight copies over the slow links, relay one.
        (topology(8, 8, 1), "relay"),
        (topology(2, 4, 2, slow_link="shared"), "relay"),
        (topology(2, 1, 4, slow_link="shared"), "two_stage"),
        # As fast between clusters as within: few senders would have to send the model many times, and for many it is all one.
        (topology(1, 8, 1, slow_gbps=None), "relay"),
        (topology(8, 8, 1, slow_gbps=None), "two_stage"),
    ],
)
def test_the_cheapest_is_chosen_of_equals_the_one_that_spares_slow_links_and_of_those_the_simplest(its, chosen):
    plan, costs = choose(its, MODEL)
    assert plan.method == chosen
    assert costs[chosen].seconds <= 1.05 * min(it.seconds for it in costs.values())


def test_what_is_under_way_on_each_hop_counts_where_the_model_is_small():
    its = topology(8, 8, 1)
    assert choose(its, 64 << 20, hop_bytes=64 << 10)[0].method == "relay"
    assert choose(its, 64 << 20, hop_bytes=32 << 20)[0].method == "two_stage"


def bottleneck(method: str, case: Case, model: float) -> float:
    """Bytes over bandwidth of the busiest link, by the table at `cost`: one rank on each trainer host, one cluster of hosts."""
    most, ranks, hosts, workers = max(case.shares), case.senders, case.hosts, case.workers_per_host
    slow, fast = model / case.slow, model / case.slow / FAST_OVER_SLOW
    served = max(
        sum(worker % ranks == rank for worker in range(host * workers, (host + 1) * workers))
        for rank in range(ranks) for host in range(hosts)
    )  # fmt: skip
    over_slow = {"two_stage": (most, hosts), "pull": (served, hosts * workers)}.get(method, (most, 1))
    interface = {
        "two_stage": max(1, hosts * most),
        "root": max(1, (hosts - 1) * workers),
        "pull": max(workers, ceil(hosts * workers / ranks)),
    }.get(method, 1)
    return max(slow * over_slow[case.slow_link == "shared"], fast * interface)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_ways_cost_their_bytes_over_the_bandwidth_of_the_busiest_link_and_the_choice_follows(case):
    its = topology_of_case(case, [f"t{at}" for at in range(case.senders)], [f"h{at}" for at in range(case.hosts)])
    plan, costs = choose(its, MODEL)
    wanted = {method: bottleneck(method, case, MODEL) for method in METHODS}
    assert {method: it.seconds for method, it in costs.items()} == pytest.approx(wanted, rel=0.02)
    least = min(wanted.values())
    assert wanted[plan.method] == pytest.approx(least)
    copies = {method: costs[method].nbytes["slow"] for method in METHODS if wanted[method] == pytest.approx(least)}
    assert copies[plan.method] == pytest.approx(min(copies.values()))


def test_who_holds_a_shard_only_cannot_be_pulled_from():
    its = topology(2, whole=False)
    assert "pull" not in possible(its)
    with pytest.raises(UserError, match="pull takes the whole model from one trainer rank"):
        make_plan("pull", its)
    with pytest.raises(UserError, match="'push' is no way of a weight sync; there are two_stage, relay, root, chain, pull"):
        make_plan("push", its)


FILE = """
model_bytes: 8000000000
senders: [{host: t0, ranks: 2}, {host: t1, ranks: 2}]
hosts: [{host: r0, workers: 4}, {host: r1, workers: 4}]
links: {fast_gbps: 200, slow_gbps: 20, slow_link: shared}
"""


def test_the_command_prints_the_plan(tmp_path, capsys):
    path = tmp_path / "sync.yaml"
    path.write_text(FILE)
    plan_command(sync=path, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"] == "relay" and set(found["methods"]) == {"two_stage", "relay", "root", "chain"}
    assert found["methods"]["two_stage"]["bytes"]["slow"] == pytest.approx(16e9)
    assert sum(flow["bytes"] for flow in found["flows"] if flow["link"] == "slow") == 8_000_000_000
    assert found["flows"][-1] == {
        "from": "rollout worker 0 on r0", "to": "rollout worker 4 on r1", "link": "fast", "bytes": 8_000_000_000
    }  # fmt: skip
    plan_command(sync=path)
    assert "7.45 GiB of weights go by relay" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model_bytes": 0}, "model_bytes is 0; it must be at least 1"),
        ({"senders": []}, "senders and hosts each need at least one host"),
        ({"senders": [{"host": "t", "ranks": 0}]}, r"senders\[0\]: ranks is 0"),
        ({"senders": [{"host": "t", "ranks": 2, "shares": [0.5, 0.6]}]}, "1 together"),
        ({"hosts": [{"host": "r", "workers": 0}]}, r"hosts\[0\].workers is 0; it must be at least 1"),
        ({"links": {"slow_gbps": -1}}, "links.slow_gbps is -1.0; it must be above 0"),
        ({"links": {"speed": 1}}, "unknown field `speed`.*; allowed: fast_gbps, slow_gbps"),
        ({"model": 3}, "unknown field `model`; allowed: model_bytes, senders"),
        ({"model_bytes": 10**400}, "it must be at least 1 and at most"),
        ({"senders": [{"host": "t", "ranks": 10**8}]}, "ranks is 100000000; it must be at least 1 and at most 4096"),
        ({"senders": [{"host": "t", "ranks": 2, "shares": [float("nan"), 0.5]}]}, "1 together"),
        ({"links": {"fast_gbps": float("inf")}}, "links.fast_gbps is inf; it must be above 0 and finite"),
    ],
)
def test_what_is_wrong_in_the_file_is_said(change, error):
    good = {"model_bytes": 10, "senders": [{"host": "t"}], "hosts": [{"host": "r"}]}
    read_topology(good)
    with pytest.raises(UserError, match=error):
        read_topology({**good, **change})


def test_one_kind_of_file_at_a_time():
    with pytest.raises(UserError, match="give a file of jobs; or --sync"):
        plan_command()
    with pytest.raises(UserError, match="--sync takes one file of its own"):
        plan_command([Path("jobs.yaml")], sync=Path("sync.yaml"))
    with pytest.raises(UserError, match="--pools and --observed belong to --memory"):
        plan_command(sync=Path("sync.yaml"), pools=Path("pools.yaml"))
