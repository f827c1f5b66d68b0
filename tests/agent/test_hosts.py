"""Two hosts, an agent on each, and real processes: what the agents see is what goes on."""

import json
import time

from verl_mux.profiling.eventlog import events


def node(coordinator, name):
    return coordinator.snapshot()["pools"]["rollout"]["nodes"][name]


def holders(coordinator, name):
    return [held["job"] for held in node(coordinator, name)["holders"]]


def both_heard(coordinator):
    found = coordinator.snapshot()["hosts"]
    return {name for name, host in found.items() if host["agent"] == "heard"} == {"hosta", "hostb"}


def begin(coordinator, hosts, eventually, tmp_path):
    agents = [host.agent(coordinator.address, tmp_path / "logs") for host in hosts]
    eventually(lambda: both_heard(coordinator))
    return agents


def hold(host, coordinator, job, *nodes):
    """A driver that holds a lease and memory under it."""
    driver = host.job("driver", coordinator.address, job, *nodes, uid=f"uid-of-{job}")
    assert driver.stdout.readline().startswith("holds ")
    return driver


def worker(host, job, on):
    started = host.job("worker", on, uid=f"uid-of-{job}")
    assert started.stdout.readline().startswith("holds ")
    return started


def mapped(tmp_path):
    """Lines of all agents' logs about memory, in order of time."""
    lines = [json.loads(line) for file in (tmp_path / "logs").rglob("*.jsonl") for line in file.read_text().splitlines()]
    return sorted((line for line in lines if line["event"] == events.DEVICE_MEMORY), key=lambda line: line["timestamp"])


def most_jobs_at_once(lines, on):
    held, most = {}, 0
    for line in lines:
        about = line["extra"]
        if about["node"] == on:
            held[about["pid"], about["job"]] = about["bytes"]
            most = max(most, len({job for (_, job), num_bytes in held.items() if num_bytes}))
    return most


def test_what_a_killed_driver_leaves_on_another_host_is_ended_and_its_node_goes_on(serve, hosts, eventually, tmp_path):
    coordinator = serve()
    begin(coordinator, hosts, eventually, tmp_path)
    driver = hold(hosts[0], coordinator, "a", "r1")
    left = worker(hosts[1], "a", "r1")
    eventually(lambda: coordinator.snapshot()["hosts"]["hostb"]["device_bytes"] == 1000)
    waiting = hosts[1].job("driver", coordinator.address, "b", "r1", uid="uid-of-b")
    eventually(lambda: node(coordinator, "r1")["queue"])
    killed_at = time.monotonic()
    hosts[0].kill(driver)
    assert waiting.stdout.readline().startswith("holds ")
    took = time.monotonic() - killed_at
    assert left.wait(60) != 0
    assert holders(coordinator, "r1") == ["b"]
    eventually(lambda: [line["extra"]["job"] for line in mapped(tmp_path) if line["extra"]["bytes"]][-1:] == ["b"])
    assert most_jobs_at_once(mapped(tmp_path), "r1") == 1
    assert took < 10, "0.5 s until the agent looks, the grace, its look after that; the rest is a loaded machine"


def test_a_host_whose_agent_is_gone_is_fenced_and_comes_back_when_it_was_found_empty(serve, hosts, eventually, tmp_path):
    coordinator = serve()
    agents = begin(coordinator, hosts, eventually, tmp_path)
    driver = hold(hosts[0], coordinator, "a", "r0", "r1")
    left = worker(hosts[1], "a", "r1")
    hosts[1].kill(agents[1])
    eventually(lambda: node(coordinator, "r1")["fenced"])
    assert node(coordinator, "r1")["fenced"] == "the agent of host hostb is not heard"
    assert coordinator.snapshot()["hosts"]["hostb"]["agent"] == "gone"
    hosts[0].kill(driver)
    hold(hosts[0], coordinator, "b", "r0")
    eventually(lambda: coordinator.snapshot()["jobs"]["a"]["state"] == "ended")
    waiting = hosts[1].job("driver", coordinator.address, "c", "r1", uid="uid-of-c")
    eventually(lambda: [request["held_back"] for request in node(coordinator, "r1")["queue"]] == ["fenced"])
    assert "job 'a' may be left there" in node(coordinator, "r1")["fenced"]
    assert left.poll() is None and holders(coordinator, "r1") == []
    hosts[1].agent(coordinator.address, tmp_path / "logs")
    assert waiting.stdout.readline().startswith("holds ")
    assert left.wait(60) != 0
    assert node(coordinator, "r1")["fenced"] is None
