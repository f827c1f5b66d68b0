"""What `verl-mux doctor --cluster` says of hosts: this machine twice, one that is not reached, and what is judged wrong."""

from __future__ import annotations

import pytest

from verl_mux.launcher.cluster.check import Seen, as_json, check, judge
from verl_mux.launcher.cluster.look import PACKAGES
from verl_mux.launcher.cluster.reach import HostSpec

VERSIONS = {"python": "3.11.4", **dict.fromkeys(PACKAGES, "1.0")}
ABOUT = {
    "address": "10.0.0.1", "name_is": "10.0.0.1", "versions": VERSIONS, "gpus": ["H100"] * 8, "free_blocks": 200,
    "interfaces": {"eth0": {"address": "10.0.0.1", "mbit_per_s": 100_000}},
}  # fmt: skip


def _judged(skew: float = 0.0, **differs) -> Seen:
    seen = Seen("b", {**ABOUT, **differs}, skew_s=skew, within_s=0.01)
    judge(seen, Seen("a", ABOUT), gpus=8)
    return seen


def test_hosts_are_looked_at_and_one_that_is_not_reached_says_why():
    hosts = {
        "one": HostSpec(via="local"),
        "two": HostSpec(via=["env"]),
        "gone": HostSpec(via=["sh", "-c", "echo no way >&2; exit 9"]),
    }
    seen = check(hosts, {}, "127.0.0.1", without_gpus=True)
    assert [one.host for one in seen] == list(hosts)
    assert seen[2].wrong == ["not reached: exit code 9: no way"] and not as_json(seen)["ok"]
    for one in seen[:2]:
        assert one.about["address"] == "127.0.0.1" and one.about["versions"]["ray"] and one.about["free_blocks"] > 0
        assert abs(one.skew_s) <= one.within_s + 0.05


def test_a_host_like_the_others_has_nothing_wrong():
    seen = _judged()
    assert (seen.wrong, seen.odd) == ([], [])


@pytest.mark.parametrize(
    ("differs", "text"),
    [
        ({"gpus": ["H100"]}, "1 GPUs, its nodes have 8"),
        ({"skew": -3.0}, "its clock is -3.0 s off"),
        ({"free_blocks": 0}, "no block of ports is free"),
        ({"versions": {**VERSIONS, "verl": "0.9.0"}}, "verl 0.9.0, on a 1.0"),
        ({"versions": {**VERSIONS, "sglang": None}}, "sglang is not installed"),
        ({"address": None}, "no way to the coordinator's address"),
    ],
)
def test_what_keeps_jobs_from_running_is_wrong(differs, text):
    assert _judged(**differs).wrong == [text]


@pytest.mark.parametrize(
    ("differs", "text"),
    [
        ({"name_is": "127.0.1.1"}, "its own name stands for 127.0.1.1"),
        ({"interfaces": {"eth0": {"address": "10.0.0.1", "mbit_per_s": 1000}}}, "no interface is known to have 10 Gb/s"),
    ],
)
def test_what_may_slow_jobs_down_is_odd(differs, text):
    seen = _judged(**differs)
    assert seen.wrong == [] and text in seen.odd[0]
