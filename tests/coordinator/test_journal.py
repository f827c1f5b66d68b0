"""What a coordinator remembers across its own end, and what it withholds until that is on disk."""

import collections
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from tests.coordinator.conftest import POOLS
from tests.full_disk import no_room_beyond
from verl_mux.coordinator import journal as journal_module
from verl_mux.coordinator import journal_files as frames
from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.members import seconds_since_boot
from verl_mux.coordinator.core.leases import LAST_EPOCH, LAST_TOKEN, epoch_of, last_possible, tokens_before
from verl_mux.coordinator.core.records import Input, Send, Settled
from verl_mux.coordinator.journal import Delivery, Journal
from verl_mux.coordinator.journal_files import Damaged, FrameFile, default_path
from verl_mux.errors import UserError

SIDES = {"rollout": ["r0"], "train": ["t0"]}


def take(journal, machine, now, what):
    machine.handle(given := Input(now, what))
    if machine.changes(given):
        journal.append(given)
    assert journal.commit(machine)


def a_history(journal, machine):
    """Job a holds r0 and job b waits for it."""
    for job in "ab":
        who = {"job": job, "uid": f"{job}:1", "client": job}
        take(journal, machine, 1.0, m.Register(**who, host="h", pid=1, started=1, nodes=SIDES))
        take(journal, machine, 2.0, m.LeaseRequest(**who, key=job, phase="rollout", step=1, nodes=["r0"]))
        take(journal, machine, 3.0, m.Heartbeat(**who, beat=1))
        take(journal, machine, 4.0, m.MemoryReport(**who, node="r0", tags={"weights": 5}))


@pytest.fixture
def start(make):
    """Starts a coordinator's memory and ends what was started before it, as a kill would."""
    running = []

    def begin(path, config=None, is_first=True):
        end()
        running.append(Journal(path))
        return running[-1], running[-1].restore(config or make(), "name", is_first)

    def end():
        while running:
            running.pop().close()

    yield begin
    end()


@pytest.fixture
def tmp_path(tmp_path):
    """In memory where there is such a place: some of these tests begin thousands of times."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def path(start, tmp_path):
    """A journal with a history."""
    a_history(*start(tmp_path / "journal"))
    start(tmp_path / "another")  # which ends the first
    return tmp_path / "journal"


@pytest.fixture(params=[20_000, 3], ids=["never compacted", "compacted all the time"])
def compaction(request, monkeypatch):
    monkeypatch.setattr(journal_module, "COMPACT_EVERY", request.param)


def is_settling(machine):
    return machine.state.settle_until is not None


def test_replay_gives_the_live_state_back(start, tmp_path, compaction):
    journal, machine = start(tmp_path / "journal")
    a_history(journal, machine)
    _, again = start(tmp_path / "journal", is_first=False)
    assert again.state == msgspec.structs.replace(machine.state, token=tokens_before(1))
    assert [lease.token for lease in again.state.leases.values()] == [1]
    assert [request.job for request in again.state.requests] == ["b"]


def test_mere_signs_of_life_take_no_place(path):
    assert len(frames.parse(path.read_bytes()).frames) == 1 + 6


# --- what may be missing ---


@pytest.mark.parametrize("name", ["journal", None])
def test_where_none_was_it_settles_only_if_jobs_may_come_back(start, tmp_path, name):
    path = name and tmp_path / name
    journal, machine = start(path)
    assert not is_settling(machine) and journal.lost is None
    path = name and tmp_path / "another"
    journal, machine = start(path, is_first=False)
    assert is_settling(machine) and journal.lost == (f"no journal was found at {path}" if path else "no journal is kept")


def test_a_coordinator_that_ended_while_it_settled_settles_anew(start, tmp_path):
    start(tmp_path / "journal", is_first=False)
    _, machine = start(tmp_path / "journal")
    assert is_settling(machine)


def claiming(token):
    claim = m.Claim(token=token, key="k", phase="rollout", step=1, nodes=["r0"], granted_at=1.0)
    who = {"job": "a", "uid": "a:1", "client": "a", "host": "h", "pid": 1, "started": 1}
    return m.Register(**who, nodes=SIDES, held=[claim], seen=token, again=True)


def test_a_coordinator_that_lost_its_memory_twice_still_believes_claims_of_before(start, path):
    seen = tokens_before(7) + 5
    for file in path.parent.glob("journal*"):
        file.unlink()
    start(path, is_first=False)  # it ends before anybody spoke to it
    start(path.with_name("another"))
    path.unlink()
    journal, machine = start(path)
    take(journal, machine, 1.0, claiming(seen))
    assert list(machine.state.leases) == [seen] and machine.state.token >= tokens_before(8)


def test_a_coordinator_that_settled_has_learnt_all_and_believes_no_later_claim(start, path):
    for file in path.parent.glob("journal*"):
        file.unlink()
    journal, machine = start(path, is_first=False)
    take(journal, machine, 1.0, Settled())
    start(path.with_name("another"))
    path.unlink()
    journal, machine = start(path)
    take(journal, machine, 1.0, claiming(tokens_before(7) + 5))
    assert not machine.state.leases


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), r"is gone \(there was one in epoch 0\)"),
        (lambda path: path.write_bytes(b""), r"is empty \(there was one in epoch 0\)"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "without its end mark, after 7 good records"),
        (lambda path: path.with_name("journal.epoch").unlink(), "journal.epoch is gone"),
        (lambda path: path.with_name("journal.epoch").write_bytes(b"{}"), "journal.epoch is damaged"),
    ],
    ids=["deleted", "emptied", "cut", "epoch deleted", "epoch damaged"],
)
def test_what_is_missing_is_noticed_and_tokens_rise_all_the_same(start, path, spoil, words):
    spoil(path)
    journal, machine = start(path)
    assert is_settling(machine) and words.replace("\\", "") in journal.lost
    assert machine.state.token == tokens_before(1)


def test_an_old_copy_that_was_put_back_is_noticed(start, path, tmp_path):
    shutil.copy(path, tmp_path / "copy")
    start(path)
    start(tmp_path / "another")
    shutil.copy(tmp_path / "copy", path)
    journal, machine = start(path)
    assert is_settling(machine) and "is an old one (epoch 0, but there was 1)" in journal.lost
    assert machine.state.token == tokens_before(2)


def test_the_journal_of_another_coordinator_is_refused(start, path, tmp_path):
    shutil.copy(tmp_path / "another", path)
    with pytest.raises(UserError, match=r"it belongs to another coordinator than .*\. Put the right file"):
        start(path)


@pytest.fixture
def no_disk(monkeypatch):
    """These tests spoil files themselves, thousands of times."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)


def outcome(start, path):
    try:
        journal, machine = start(path)
    except UserError as error:
        return "refused" if "move this one away" in str(error) and "\n" not in str(error) else str(error)
    return "settled" if is_settling(machine) and journal.lost else "a silent start"


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_a_journal_cut_or_flipped_at_any_byte_is_refused_or_settled(start, path, how, no_disk):
    """Never a silent fresh start, and never one line that does not say what to do."""
    whole, epoch = path.read_bytes(), path.with_name("journal.epoch").read_bytes()
    outcomes = collections.Counter()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] if how == "cut" else whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :])
        path.with_name("journal.epoch").write_bytes(epoch)
        outcomes[outcome(start, path)] += 1
    assert set(outcomes) == {"refused", "settled"}
    print(how, dict(outcomes))


def test_an_epoch_file_cut_or_flipped_at_any_byte_is_refused_or_settled(start, path, no_disk):
    whole, epoch = path.read_bytes(), path.with_name("journal.epoch").read_bytes()
    for at in range(len(epoch) - 1):  # the last is the end of the line
        for spoilt in (epoch[:at], epoch[:at] + bytes([epoch[at] ^ 1]) + epoch[at + 1 :]):
            path.write_bytes(whole)
            path.with_name("journal.epoch").write_bytes(spoilt)
            journal, machine = start(path)
            assert is_settling(machine) and journal.lost


def test_a_file_that_is_no_journal_is_refused(start, tmp_path):
    (tmp_path / "journal").write_text("something else entirely, and long enough to be looked at" * 20)
    with pytest.raises(UserError, match="cannot be used: its first record is not one of a verl-mux journal"):
        start(tmp_path / "journal")


def test_an_input_of_another_version_is_refused_in_one_line(start, path):
    body = msgspec.msgpack.encode([{"now": 1.0, "what": 2}])
    file = FrameFile(path, frames.parse(path.read_bytes()).frames[0])
    file.append(body)
    file.close()
    with pytest.raises(UserError, match="another version of verl-mux wrote it"):
        start(path)


class PowerLoss(BaseException):
    pass


@pytest.mark.parametrize("seed", range(150))
def test_every_lease_that_a_client_knows_is_still_known_after_a_power_failure(start, tmp_path, monkeypatch, seed, no_disk):
    """Of what was not synced any sectors are on the disk; the leases noted before are there, or it settles."""
    draw = random.Random(seed)
    left, noted = draw.randrange(2, 12), {}
    journal, machine = start(tmp_path / "journal")

    def write(file, at, data):
        nonlocal left
        left -= 1
        for sector in range(0, len(data), 512):
            if left or draw.random() < 0.5:
                os.pwrite(file, data[sector : sector + 512], at + sector)
        if not left:
            raise PowerLoss

    monkeypatch.setattr(frames, "_write", write)
    monkeypatch.setattr(journal_module, "COMPACT_EVERY", draw.choice([3, 100]))
    with pytest.raises(PowerLoss):
        while True:
            who = {"job": "a", "uid": "a:1", "client": "a"}
            take(journal, machine, 1.0, m.Register(**who, host="h", pid=1, started=1, nodes=SIDES))
            take(journal, machine, 1.0, m.PhaseNote(**who, note="x" * draw.randrange(3000)))
            take(
                journal, machine, 2.0, m.LeaseRequest(**who, key=str(machine.state.token), phase="rollout", step=1, nodes=["r0"])
            )
            noted = dict(machine.state.leases)
            token, noted = max(noted), {} if draw.random() < 0.5 else noted
            if not noted:  # given back, whether the coordinator gets to write it down or not
                take(journal, machine, 3.0, m.LeaseRelease(**who, token=token))
    last = machine.state.token
    monkeypatch.undo()
    _, again = start(tmp_path / "journal")
    assert is_settling(again) or all(again.state.leases[token] == lease for token, lease in noted.items())
    assert again.state.token > last


def test_a_client_that_claims_the_last_token_of_all_keeps_no_later_start_from_coming(start, tmp_path):
    for _ in range(3):  # each time all memory is lost
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        journal, machine = start(tmp_path / "journal", is_first=False)
        last = {"key": "k", "phase": "rollout", "step": 1, "nodes": ["r0"], "granted_at": 1.0}
        who = {"job": "a", "uid": "a:1", "client": "a", "host": "h", "pid": 1, "started": 1, "nodes": SIDES}
        for token in (LAST_TOKEN, last_possible(time.time())):
            held = [m.Claim(token=min(token, 2**53), **last)]
            take(journal, machine, 1.0, m.Register(**who, again=True, seen=token, held=held))
    _, again = start(tmp_path / "journal")
    assert epoch_of(again.state.token) < LAST_EPOCH / 4


def test_a_journal_of_large_inputs_is_compacted_by_its_bytes(start, tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 50_000)
    journal, machine = start(tmp_path / "journal")
    who = {"job": "a", "uid": "a:1", "client": "a"}
    take(journal, machine, 1.0, m.Register(**who, host="h", pid=1, started=1, nodes=SIDES))
    for step in range(100):
        metrics = {f"{at}{'x' * 200}": 1.0 for at in range(60)}
        take(journal, machine, 2.0, m.StepReport(**who, step=step, metrics=metrics))
        assert (tmp_path / "journal").stat().st_size < 100_000
    _, again = start(tmp_path / "journal")
    assert again.state.jobs["a"].reported == 99


# --- whose it is ---


def test_a_journal_in_use_is_refused_to_a_second_coordinator(make, start, tmp_path):
    start(tmp_path / "journal")
    with pytest.raises(UserError, match=rf"is in use by another coordinator \(pid {os.getpid()}\): stop that one"):
        Journal(tmp_path / "journal")
    start(tmp_path / "journal")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be used: .*Not a directory|cannot be used: .*File exists"):
        Journal(tmp_path / "file" / "journal")


# --- another configuration ---


def test_a_journal_of_another_configuration_with_unfinished_jobs_is_refused(make, start, path):
    with pytest.raises(UserError, match=r"another configuration and holds unfinished jobs \(a, b\)"):
        start(path, make(schedule=[{"mode": "sequential"}]))
    with pytest.raises(UserError, match=r"holds unfinished jobs \(a, b\)"):
        start(path, make(pools={**POOLS, "train": {"nodes": [{"name": "t0", "gpus": 8}]}}))


def test_while_jobs_run_nodes_and_pools_may_be_added_and_times_changed(make, start, path):
    train = {"nodes": [*POOLS["train"]["nodes"], {"name": "t1", "gpus": 4}]}
    config = make(pools={**POOLS, "train": train, "more": {"nodes": [{"name": "m0"}]}}, lease_timeout=9)
    _, machine = start(path, config)
    assert [lease.job for lease in machine.state.leases.values()] == ["a"] and machine.config == config


def test_tokens_go_on_rising_when_the_configuration_changed_between_runs(make, start, tmp_path):
    journal, machine = start(tmp_path / "journal")
    a_history(journal, machine)
    for job in "ab":
        take(journal, machine, 5.0, m.Deregister(job=job, uid=f"{job}:1", client=job))
    _, again = start(tmp_path / "journal", make(schedule=[{"mode": "sequential"}]))
    assert (again.state.token, again.state.jobs) == (tokens_before(1), {})


# --- time ---


def test_time_goes_on_through_a_restart(start, path):
    journal, _ = start(path)
    assert abs(journal.clock.now() - seconds_since_boot()) < 1e-9 + 60


@pytest.mark.parametrize("uptime", [1.0, 1e9])
def test_time_goes_on_after_a_reboot_from_what_was_written_last(start, tmp_path, monkeypatch, uptime):
    journal, machine = start(tmp_path / "journal")
    last = journal.clock.now() + 50
    take(journal, machine, last, m.Register(job="a", uid="a:1", client="a", host="h", pid=1, started=1, nodes=SIDES))
    monkeypatch.setattr(journal_module, "boot_id", lambda: "the next one")
    monkeypatch.setattr(journal_module, "seconds_since_boot", lambda: uptime)
    journal, _ = start(tmp_path / "journal")
    assert journal.clock.now() == pytest.approx(last)


WHO = {"job": "a", "uid": "a:1", "client": "a"}
REGISTER = m.Register(**WHO, host="h", pid=1, started=1, nodes={"rollout": ["r0"], "train": ["t0"]})
BEAT = m.Heartbeat(**WHO, beat=1)


def ask(key, phase="rollout", node="r0"):
    return m.LeaseRequest(**WHO, key=key, phase=phase, step=1, nodes=[node])


class World:
    """A journal, a machine and a delivery; which messages left, and how often something was written."""

    def __init__(self, path, config, monkeypatch):
        self.journal = Journal(path)
        self.machine = self.journal.restore(config, "name", is_first=True)
        self.noted, self.later, self.fail = [], [], None
        self.delivery = Delivery(self.journal, self.machine, self.carry_out, self.later.append)
        self.writes = 0
        write = type(self.journal)._write

        def counted(journal, *arguments):
            self.writes += 1
            if self.fail:
                raise self.fail
            write(journal, *arguments)

        monkeypatch.setattr(type(self.journal), "_write", counted)
        monkeypatch.setattr("verl_mux.coordinator.journal._RETRY_S", 0.0)

    def carry_out(self, instruction):
        if isinstance(instruction, Send):
            self.noted.append(instruction.message.__struct_config__.tag)

    def take(self, what):
        keep = self.machine.changes(given := Input(1.0, what))
        self.delivery.take(given, self.machine.handle(given), keep)


@pytest.fixture
def world(make, tmp_path, monkeypatch):
    world = World(tmp_path / "journal", make(), monkeypatch)
    yield world
    world.journal.close()


def test_no_answer_leaves_before_its_input_is_written_and_inputs_that_came_together_are_one_write(world):
    for what in (REGISTER, BEAT, ask("k")):
        world.take(what)
    assert (world.noted, world.writes, len(world.later)) == ([], 0, 1)
    world.later.pop()()
    assert (world.noted, world.writes) == (["REGISTERED", "HEARTBEAT_ACK", "LEASE_GRANT"], 1)


def test_a_sign_of_life_is_answered_without_a_write(world):
    world.take(REGISTER)
    world.later.pop()()
    world.take(BEAT)
    assert (world.noted[-1], world.writes, world.later) == ("HEARTBEAT_ACK", 1, [])


def test_what_is_for_people_waits_for_the_next_write_in_its_place(world, make, tmp_path):
    world.take(REGISTER)
    world.later.pop()()
    world.take(m.PhaseNote(**WHO, note="sync"))
    assert (world.writes, world.later) == (1, [])
    world.delivery.flush()
    assert world.writes == 2
    world.journal.close()
    again = Journal(tmp_path / "journal")
    assert again.restore(make(), "name", is_first=True).state.jobs["a"].note == "sync"
    again.close()


def test_a_flood_without_a_pause_is_written_all_the_same(world, monkeypatch):
    monkeypatch.setattr(journal_module, "MOST_TOGETHER", 3)
    for what in (REGISTER, ask("k"), ask("l", "train", "t0")):
        world.take(what)
    assert world.noted == ["REGISTERED", "LEASE_GRANT", "LEASE_GRANT"]


def test_while_nothing_can_be_written_grants_wait_and_signs_of_life_are_answered(world, caplog, make, tmp_path):
    world.take(REGISTER)
    world.later.pop()()
    world.fail = OSError(28, "No space left on device")
    for _ in range(3):
        world.take(ask("k"))  # the client asks again every second
        world.later.pop()()
    world.take(BEAT)
    assert world.noted == ["REGISTERED", "HEARTBEAT_ACK"]
    assert world.journal.about()["blocked"] == "No space left on device"
    assert [record.message for record in caplog.records] == [
        f"journal {tmp_path / 'journal'} cannot be written (No space left on device): nothing is granted until it can"
    ]
    world.fail = None
    world.delivery.flush()
    assert world.noted == ["REGISTERED", "HEARTBEAT_ACK", "LEASE_GRANT"]
    assert world.journal.about()["blocked"] is None
    world.journal.close()
    again = Journal(tmp_path / "journal")
    assert [lease.key for lease in again.restore(make(), "name", is_first=True).state.leases.values()] == ["k"]
    again.close()


# --- files ---

BODIES = [b"snapshot", b"one", b"", b"three" * 9]


@pytest.fixture
def frame_file(tmp_path):
    file = FrameFile(tmp_path / "journal", BODIES[0])
    for body in BODIES[1:]:
        file.append(body)
    file.close()
    return tmp_path / "journal"


def is_noticed(data):
    """Refused, or read as far as it is right and said to be incomplete."""
    try:
        contents = frames.parse(data)
    except Damaged:
        return True
    return contents.lost is not None and contents.frames == BODIES[: len(contents.frames)]


def test_a_flip_of_any_bit_is_noticed(frame_file):
    data = frame_file.read_bytes()
    for at in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        assert is_noticed(bytes(flipped)), at


@pytest.mark.parametrize("filling", [b"vmxF" * 2**20, b"vmxF\x01\0\0\0\0\0\0\0\xff\xff\xff\xff" * 2**18], ids=["marks", "heads"])
def test_a_torn_tail_full_of_what_looks_like_frames_is_read_at_once(tmp_path, filling):
    file = FrameFile(tmp_path / "journal", BODIES[0])
    file.append(filling)
    file.close()
    data = (tmp_path / "journal").read_bytes()[:-100]
    began = time.process_time()
    contents = frames.parse(data)
    assert time.process_time() - began < 1.0
    assert contents.frames == BODIES[:1] and "without its end mark" in contents.lost


def test_bytes_taken_out_put_in_or_added_anywhere_are_noticed(frame_file):
    data, draw = frame_file.read_bytes(), random.Random(0)
    for _ in range(2000):
        start, stop = sorted(draw.choices(range(len(data) + 1), k=2))
        changed = data[:start] + draw.randbytes(draw.choice([0, 1, 40])) + data[stop:]
        assert changed == data or is_noticed(changed)


def test_frames_of_another_file_are_none_of_this(frame_file, tmp_path):
    other = FrameFile(tmp_path / "other", b"another snapshot")
    for body in BODIES[1:]:
        other.append(body)
    other.close()
    mine, theirs = frame_file.read_bytes(), (tmp_path / "other").read_bytes()
    assert is_noticed(mine[: -len(theirs) // 2] + theirs[-len(theirs) // 2 :])


def test_a_write_for_which_there_is_no_room_leaves_the_file_as_it_was(tmp_path):
    file = FrameFile(tmp_path / "journal", BODIES[0])
    before = (tmp_path / "journal").read_bytes()
    with pytest.raises(OSError, match="File too large"), no_room_beyond(len(before) + 50):
        file.append(b"x" * 1000)
    assert (tmp_path / "journal").read_bytes() == before
    file.close()


def test_a_new_file_takes_the_place_of_the_old_one_only_when_it_is_complete(frame_file):
    with pytest.raises(OSError, match="File too large"), no_room_beyond(100):
        FrameFile(frame_file, b"y" * 1000)
    assert frames.parse(frame_file.read_bytes()) == (BODIES, None)


def test_one_for_each_configuration_file_and_address(state_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = default_path(Path("pools.yaml"), "tcp://127.0.0.1:5570")
    assert path == default_path(tmp_path / "pools.yaml", "tcp://127.0.0.1:5570")
    assert path.is_relative_to(state_folder / "verl_mux") and path.parent.name.startswith("pools-127-0-0-1-5570-")
    assert (
        len({path, default_path(Path("pools.yaml"), "tcp://127.0.0.1:1"), default_path(Path("x.yaml"), "tcp://127.0.0.1:5570")})
        == 3
    )


def test_a_relative_state_folder_does_not_count(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path(Path("a.yaml"), "tcp://h:1").is_relative_to(tmp_path / ".local" / "state")


def test_where_there_is_no_home_one_has_to_say(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UserError, match="name one with --journal, or say --no-journal"):
        default_path(Path("a.yaml"), "tcp://h:1")
