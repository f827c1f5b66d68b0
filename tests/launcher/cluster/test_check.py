"""What `verl-mux doctor --cluster` says of hosts: this machine twice, one that is not reached, and what is judged wrong."""

from __future__ import annotations

import socket
import subprocess

import pytest
from rich.console import Console

from verl_mux.errors import Failure
from verl_mux.launcher.cluster.check import Seen, as_json, check, judge, show
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


def _beside(towards: str, shared=None, at=None, **spec) -> Seen:
    """This machine under a second name, with what is said of it, beside itself."""
    hosts = {"one": HostSpec(via="local"), "two": HostSpec(via="local", **spec)}
    return check(hosts, {}, towards, without_gpus=True, shared=shared, at=at)[1]


def test_each_host_is_to_reach_the_others_and_the_coordinator(tmp_path):
    assert _beside("127.0.0.1", tmp_path / "runs" / "new").wrong == []
    assert not list(tmp_path.iterdir())
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        at = closed.getsockname()
        assert _beside("127.0.0.1", at=at).wrong == [
            f"the coordinator is not reached from there at 127.0.0.1:{at[1]}: Connection refused"
        ]


def test_an_address_that_the_host_has_not_is_wrong():
    assert "`address` is 192.0.2.1; it has " in _beside("127.0.0.1", address="192.0.2.1").wrong[-1]


def test_a_folder_that_a_host_does_not_see_is_wrong(tmp_path):
    """A mount namespace of its own hides what is there."""
    hidden = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {tmp_path} && exec "$@"', "sh"]
    if subprocess.run([*hidden, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are not allowed here")
    (seen,) = check({"one": HostSpec(via=hidden)}, {}, "127.0.0.1", without_gpus=True, shared=tmp_path)
    assert "`dir` must be on a file system of all hosts" in seen.wrong[0]


def test_bind_has_to_be_an_address_of_this_machine():
    with pytest.raises(Failure, match=r"`bind` is 192\.0\.2\.1: .*; this machine has .*127\.0\.0\.1"):
        check({"one": HostSpec(via="local")}, {}, "192.0.2.1", without_gpus=True)


def test_the_table_fits_a_narrow_terminal(capsys):
    seen = Seen("gpu-07.cluster.example", ABOUT, skew_s=0.001)
    show([seen], Console(width=80))
    out = capsys.readouterr().out
    assert "10.0.0.1" in out and "100 Gb/s" in out and "verl 1.0" in out and "…" not in out


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
