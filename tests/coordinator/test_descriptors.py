"""The limit of open files is raised as far as the process may."""

import resource

import pytest

from verl_mux.coordinator import descriptors


@pytest.mark.parametrize(
    ("limits", "allowed", "raised"),
    [((1024, 20_000), 19_800, [(20_000, 20_000)]), ((20_000, 20_000), 19_800, []), ((1024, -1), 2**18 - 200, [(2**18, -1)])],
)
def test_it_is_raised_to_what_is_allowed(limits, allowed, raised, monkeypatch):
    done = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, to: done.append(to))
    assert descriptors.clients_allowed() == allowed and done == raised
