"""Where jobs ran, by the agents' logs."""

from datetime import datetime, timezone

from verl_mux.launcher.run_file import JobSpec
from verl_mux.launcher.run_intervals import by_side
from verl_mux.profiling.plain.lines import Line

JOBS = {
    "wide": JobSpec(nodes={"rollout": ["r0", "r1"], "train": ["t0"]}),
    "one": JobSpec(nodes={"rollout": ["t0"], "train": ["t0"]}),
}


def held(job, node, host, num_bytes=1, event="device_memory"):
    extra = {"job": job, "node": node, "host": host, "bytes": num_bytes}
    when = datetime.fromtimestamp(0, timezone.utc)
    return Line(timestamp=when, event=event, duration_sec=None, extra=extra, workid=0, step=0, role="agent", job="agent")


def test_each_side_has_the_hosts_on_which_memory_was_held_for_its_nodes():
    lines = [held("wide", "r1", "b"), held("wide", "r0", "a"), held("wide", "r0", "a"), held("wide", "t0", "c")]
    assert by_side(lines, JOBS)["wide"] == {"rollout": ["a", "b"], "train": ["c"]}


def test_a_node_of_both_sides_counts_for_both_and_one_of_neither_is_told_apart():
    found = by_side([held("one", "t0", "c"), held("one", "r0", "a")], JOBS)
    assert found == {
        "one": {"rollout": ["c"], "train": ["c"], "elsewhere": ["a"]},
        "wide": {"rollout": [], "train": []},
    }


def test_memory_that_went_and_others_lines_are_passed_over():
    lines = [held("wide", "r0", "a", num_bytes=0), held("stranger", "r0", "a"), held("wide", "r0", "a", event="agent_killed")]
    assert by_side(lines, JOBS)["wide"] == {"rollout": [], "train": []}
