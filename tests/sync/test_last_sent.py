"""Syncs that send only what changed: every worker has every bit, and who lacks the sync before gets all of it."""

from __future__ import annotations

import random
import threading

import pytest

from tests.sync.cluster import Ends, Model, model_of, stripe_of, take_all
from verl_mux.sync.failure import SyncError
from verl_mux.sync.shard import Shard
from verl_mux.sync.streams import receiving, sending


@pytest.fixture(autouse=True)
def short_last_call(monkeypatch):
    for module in (sending, receiving):
        monkeypatch.setattr(module, "LAST_CALL_S", 0.2)


@pytest.fixture
def ends():
    made = []

    def make(*args, **settings) -> Ends:
        made.append(Ends(*args, delta=True, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def trained(model: Model, seed: int, share: float = 0.01) -> Model:
    """The next version: so many of its bytes are others."""
    draw, found = random.Random(seed), {}
    for name, data in model.items():
        new = bytearray(data)
        for at in draw.sample(range(len(new)), round(share * len(new))):
            new[at] ^= draw.randrange(1, 256)
        found[name] = bytes(new)
    return found


def sent(said) -> float:
    """Bytes of weights that trainers sent, as a share of all that they would have sent."""
    assert all(isinstance(it, dict) for it in said), said
    went, spared = (sum(it[name] for it in said) for name in ("sent_bytes", "spared_bytes"))
    return went / (went + spared)


def synced(its: Ends, version: int, model: Model) -> float:
    got, said = its.sync(version, model)
    assert all(it == model for it in got), [it for it in got if isinstance(it, SyncError)]
    return sent(said)


@pytest.mark.parametrize(("method", "senders", "machines"), [("two_stage", 2, "aabc"), ("relay", 3, "abcb")])
def test_fifty_sparse_updates_leave_every_worker_bit_equal(ends, method, senders, machines):
    its, model = ends(senders, list(machines), method), model_of(5, 9, 30_000)
    assert synced(its, 0, model) == 1.0
    for version in range(1, 51):
        model = trained(model, version, random.Random(version).choice((0.0, 0.001, 0.02)))
        assert synced(its, version, model) < 0.1


@pytest.mark.parametrize("method", ["root", "chain"])
def test_changes_go_from_worker_to_worker_too(ends, method):
    its, model = ends(2, list("aabc"), method), model_of(5)
    synced(its, 0, model)
    assert synced(its, 1, trained(model, 1)) < 0.1
    for end in its.workers:
        assert all(end.figures.get(f"{link}_bytes", 0) < 0.2 * 3 * sum(map(len, model.values())) for link in ("fast", "local"))


def test_what_changed_widely_goes_whole_and_the_rest_does_not(ends):
    its, model = ends(1, ["a"]), {"still": b"s" * 40_000, "moved": b"m" * 40_000}
    synced(its, 0, model)
    assert synced(its, 1, {**model, "moved": b"n" * 40_000}) == pytest.approx(0.5, abs=0.06)


def test_an_unchanged_model_is_nothing_but_its_headers(ends):
    its, model = ends(2, ["a", "b"]), model_of(5)
    synced(its, 0, model)
    assert synced(its, 1, model) == 0.0


@pytest.mark.parametrize(("method", "share"), [("two_stage", 0.5), ("relay", 0.02)])
def test_a_receiver_that_was_restarted_gets_everything_and_the_others_changes(ends, method, share):
    its, model = ends(2, ["a", "b"], method), model_of(5)
    synced(its, 0, model)
    its.workers[1].close()
    its.workers[1] = its.end("b", "rollout")
    its.join()
    assert synced(its, 1, model := trained(model, 1)) == pytest.approx(share, abs=0.05)
    assert synced(its, 2, trained(model, 2)) < 0.1


def test_a_trainer_rank_that_was_restarted_sends_everything_even_of_the_same_version(ends):
    its, model = ends(2, ["a", "b"]), model_of(5)
    synced(its, 3, model)
    its.senders[0].close()
    its.senders[0] = its.end("trainers", "train")
    its.join()
    assert synced(its, 3, model := trained(model, 1)) == pytest.approx(0.5, abs=0.05)
    assert synced(its, 4, trained(model, 2)) < 0.1


def test_after_a_sync_that_was_lost_the_next_one_is_whole(ends, monkeypatch):
    its, model = ends(2, ["a", "a", "b"]), model_of(5)
    synced(its, 0, model)
    with monkeypatch.context() as patch:
        patch.setattr("verl_mux.sync.last_sent.digest", lambda payload: 1)
        got, said = its.sync(1, trained(model, 1))
    assert all(isinstance(it, SyncError) for it in [*got, *said])
    assert synced(its, 2, model := trained(model, 2)) == 1.0
    assert synced(its, 3, trained(model, 3)) < 0.1


@pytest.mark.parametrize("method", ["two_stage", "relay"])
def test_a_host_that_missed_a_sync_gets_the_next_one_whole(ends, method):
    """From the trainers, whose sync failed with it, or from the host before it, which may have had all of it."""
    its, model = ends(2, ["a", "b"], method), model_of(5)
    synced(its, 0, model)
    its.set(timeout_s=0.5)
    missing = its.workers[1]
    got, _ = its.sync(1, trained(model, 1), take=lambda end, version: {} if end is missing else take_all(end, version))
    assert got[1] == {}
    its.set(timeout_s=10.0)
    share = synced(its, 2, model := trained(model, 2))
    assert share == 1.0 or method == "relay"
    assert synced(its, 3, trained(model, 3)) < 0.1


@pytest.mark.parametrize(
    "other",
    [
        lambda model: {**model, "new": b"n" * 5000},
        lambda model: dict(reversed(model.items())),
        lambda model: {f"{name}_": data for name, data in model.items()},
    ],
    ids=["more", "order", "names"],
)
def test_another_layout_goes_whole(ends, other):
    its, model = ends(2, ["a", "a", "b"]), model_of(5)
    synced(its, 0, model)
    assert synced(its, 1, other(model)) == 1.0
    assert synced(its, 2, trained(other(model), 2)) < 0.1


def test_a_rank_that_holds_another_part_than_before_sends_it_whole(ends):
    its, model = ends(2, ["a", "b"]), model_of(5)
    synced(its, 0, model)
    model = trained(model, 1)
    got, said = its.sync(1, model, lambda rank: _one_or_two_thirds(model, rank))
    assert all(it == model for it in got) and sent(said) == 1.0


def _one_or_two_thirds(model: Model, rank: int) -> Shard:
    parts = [stripe_of(model, third, 3, 4096) for third in ((0,), (1, 2))[rank]]
    return Shard(rank, parts[0].manifest.entries, [part for it in parts for part in it._parts], 4096)


def test_memory_that_somebody_wrote_to_is_found_out_and_the_next_sync_mends_it(ends):
    its, model = ends(2, ["a", "b"]), model_of(5)
    synced(its, 0, model)
    view = its.workers[1]._held._region.view
    view[5] ^= 1
    got, _ = its.sync(1, trained(model, 1))
    assert isinstance(got[1], SyncError) and "arrived damaged" in str(got[1])
    synced(its, 2, trained(model, 2))


def test_what_a_worker_takes_while_pieces_are_under_way_is_new(ends, monkeypatch):
    """Pieces come slowly and out of order; a tensor that is handed out early has none of its old bytes."""
    its, model = ends(3, ["a", "a", "b"], piece_bytes=512), model_of(5, 30, 5000)
    synced(its, 0, model)
    real, draw = sending.Sending._piece, random.Random(0)

    def piece(self, connection, number, *rest):
        threading.Event().wait(draw.random() / 500)
        real(self, connection, number, *rest)

    monkeypatch.setattr(sending.Sending, "_piece", piece)
    for version in range(1, 4):
        model = trained(model, version)
        assert synced(its, version, model) < 0.3
