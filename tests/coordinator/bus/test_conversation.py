"""The pure half of a client: what it says, hears and repeats, without a socket or a clock."""

import msgspec
import pytest

from verl_mux.coordinator.bus import messages as m
from verl_mux.coordinator.bus.conversation import Conversation

WHO = {"job": "a", "uid": "a:1", "client": "a-client"}
WELCOME = m.Registered(nodes={"rollout": ["r0"]}, places={}, lease_timeout=10.0, epoch="e1", first=True)


class Talk(Conversation):
    """A conversation with a clock of its own; `said` since the last look."""

    def __init__(self):
        super().__init__(WHO, {"host": "h", "pid": 1, "started": 2.0, "nodes": {"rollout": ["r0"]}})
        self.now = 0.0

    def hear(self, message):
        self.receive(message, self.now)
        return self.said()

    def wait(self, seconds=1.0):
        self.now += seconds
        self.tick(self.now)
        return self.said()

    def said(self):
        return self.outgoing()

    def grant(self, token=1, key="k", epoch="e1", nodes=("r0",)):
        about = {"phase": "rollout", "step": 1, "nodes": list(nodes), "granted_at": 0.0}
        return self.hear(m.LeaseGrant(epoch=epoch, key=key, token=token, **about))

    def ack(self, beat, tokens=(), queued=(), epoch="e1", **more):
        return self.hear(m.HeartbeatAck(beat=beat, epoch=epoch, queued=list(queued), tokens=list(tokens), **more))


def kinds(messages):
    return [type(message) for message in messages]


@pytest.fixture
def talk():
    """Registered."""
    talk = Talk()
    talk.register(talk.now)
    talk.said()
    talk.hear(WELCOME)
    talk.take_answer("register")
    return talk


@pytest.fixture
def holder(talk):
    """Holds token 1."""
    talk.request("k", "rollout", 1, ["r0"])
    talk.grant()
    talk.take_answer("k")
    talk.said()
    return talk


def test_a_registration_is_repeated_until_its_first_answer():
    talk = Talk()
    talk.register(talk.now)
    assert kinds(talk.said()) == [m.Register]
    assert kinds(talk.wait()) == kinds(talk.wait()) == [m.Register]
    talk.hear(WELCOME)
    assert talk.take_answer("register") == WELCOME
    assert kinds(talk.wait()) == [m.Heartbeat]


def test_a_client_that_never_asked_to_be_registered_sends_nothing():
    assert Talk().wait() == []


def test_a_release_is_repeated_until_it_is_answered(holder):
    key = holder.release(1)
    first = holder.said()
    (beat,) = holder.wait()
    assert beat.tokens == []
    assert holder.ack(beat.beat) == first
    holder.hear(m.LeaseReleased(token=1))
    assert holder.take_answer(key) == m.LeaseReleased(token=1)
    assert kinds(holder.wait()) == [m.Heartbeat]


def test_a_request_that_the_coordinator_has_in_its_queue_is_not_repeated(talk):
    talk.request("k", "rollout", 1, ["r0"])
    asked = talk.said()
    (beat,) = talk.wait()
    assert talk.ack(beat.beat, queued=["k"]) == []
    (beat,) = talk.wait()
    assert talk.ack(beat.beat) == asked


def test_a_job_that_waits_for_nodes_asks_again_when_the_message_that_it_has_some_was_lost():
    talk = Talk()
    talk.register(0.0)
    talk.said()
    talk.hear(m.Queued(reason="it waits", epoch="e1", answers=1))
    talk.register(0.0)
    (asked,) = talk.said()
    (beat,) = talk.wait()
    assert talk.ack(beat.beat, queued=["register"]) == []
    (beat,) = talk.wait()
    assert talk.ack(beat.beat) == [asked]


@pytest.mark.parametrize("say", ["shrink", "cancel"])
def test_a_question_without_a_waiting_caller_is_repeated_until_it_is_answered_and_leaves_nothing_behind(holder, say):
    if say == "shrink":
        holder.shrink(1, ["r1"])
    else:
        holder.request("k2", "rollout", 2, ["r0"])
        holder.said()
        holder.cancel("k2")
    (question,) = holder.said()
    (beat,) = holder.wait()
    assert holder.ack(beat.beat, [1]) == [question]
    holder.hear(m.LeaseShrunk(key=question.key) if say == "shrink" else m.LeaseCancelled(key="k2"))
    assert (holder._open, holder._answers) == ({}, {})


def test_many_nodes_are_given_back_in_one_message(talk):
    names = [f"rollout-{number:02}.gpus.example.com" for number in range(50)]
    talk.request("k", "rollout", 1, names)
    talk.said()
    talk.grant(nodes=names)
    talk.shrink(1, names[:20])
    talk.shrink(1, names[20:40])
    said = talk.said()
    assert [m.decode(m.encode(it)) for it in said] == said and len({it.key for it in said}) == 2


def test_an_unwanted_grant_is_released_at_once_and_until_that_is_answered(talk):
    assert talk.grant(5) == [m.LeaseRelease(**WHO, token=5)]
    assert talk.grant(5) == []
    (beat,) = talk.wait()
    assert talk.ack(beat.beat) == [m.LeaseRelease(**WHO, token=5)]
    assert talk.hear(m.LeaseReleased(token=5)) == []


def test_a_doubled_grant_is_one_lease(holder):
    assert holder.grant() == []
    assert list(holder.held) == [1]


def test_a_lease_that_the_answer_to_a_beat_does_not_name_is_lost(holder):
    (beat,) = holder.wait()
    holder.ack(beat.beat, [])
    assert holder.held == {}
    assert "token 1 is stale" in holder.lost[1]


def test_an_answer_to_a_beat_from_before_the_grant_says_nothing_of_it(talk):
    (beat,) = talk.wait()
    talk.request("k", "rollout", 1, ["r0"])
    talk.grant()
    talk.ack(beat.beat)
    assert list(talk.held) == [1]


def test_a_late_word_about_a_lease_that_is_being_released_does_not_count(holder):
    (beat,) = holder.wait()
    key = holder.release(1)
    holder.ack(beat.beat, [])
    assert not holder.lost and not holder.is_over(key)


@pytest.mark.parametrize("sign", ["another epoch", "unknown"])
def test_a_restarted_coordinator_gets_the_held_leases_once_and_then_at_each_beat(holder, sign):
    def show(beat):
        return holder.ack(beat.beat, epoch="e2") if sign == "another epoch" else holder.hear(m.Unknown())

    beats = [*holder.wait(), *holder.wait()]
    (again,) = show(beats[0])
    assert (again.again, [claim.token for claim in again.held]) == (True, [1])
    assert show(beats[1]) == []
    assert kinds(holder.wait()) == [m.Register]
    assert kinds(holder.hear(WELCOME)) == [m.Heartbeat]
    assert kinds(holder.wait()) == [m.Heartbeat]


def test_open_questions_go_to_a_new_coordinator_with_the_registration(talk):
    talk.request("k", "rollout", 1, ["r0"])
    (question,) = talk.said()
    talk.hear(m.Unknown())
    assert talk.hear(WELCOME)[:1] == [msgspec.structs.replace(question, number=2)]


def test_a_move_is_asked_of_a_job_by_the_newest_answer_to_a_beat_and_its_goodbye_tells_which(talk):
    assert talk.move == 0
    talk.wait()
    talk.ack(1, move=7)
    talk.wait()
    assert talk.move == 7
    talk.ack(2, epoch="e2", move=0)  # of a coordinator that does not know us yet
    assert talk.move == 7
    talk.leave("it moves", moving=talk.move, step=4, saving_s=1.5)
    (goodbye,) = talk.said()
    assert (goodbye.moving, goodbye.step, goodbye.saving_s) == (7, 4, 1.5)


def test_a_goodbye_is_repeated_until_the_coordinator_says_that_it_is_over(holder):
    holder.leave()
    goodbye = holder.said()
    assert kinds(goodbye) == [m.Deregister]
    assert holder.wait() == goodbye
    holder.hear(m.JobEnded(reason="finished"))
    assert holder.ended == "finished"
    assert holder.wait() == []


def test_a_client_that_leaves_a_coordinator_without_memory_of_it_is_done(holder):
    holder.leave()
    holder.hear(m.Unknown())
    assert holder.ended == "closed"


def test_a_job_that_fails_asserts_what_it_held_before_a_coordinator_that_forgot_it(holder):
    holder.fail("out of memory")
    failing = holder.said()
    (again,) = holder.hear(m.Unknown())
    assert [claim.token for claim in again.held] == [1]
    assert holder.hear(WELCOME)[:1] == failing


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_cancelled_request_whose_grant_has_come_is_not_held(talk, is_taken):
    talk.request("k", "rollout", 1, ["r0"])
    talk.grant()
    if is_taken:
        talk.take_answer("k")
    talk.cancel("k")
    assert talk.held == {}


def test_a_lease_may_be_used_for_a_part_of_it_after_the_last_beat_that_was_answered_was_sent(holder):
    holder.wait(1.0)
    holder.now = 6.9
    assert holder.may_use(6.9) and not holder.may_use(7.0)
    holder.ack(1, [1])
    assert holder.may_use(7.9) and not holder.may_use(8.0)


def test_a_late_answer_to_an_old_beat_does_not_shorten_the_lease(holder):
    for _ in range(3):
        holder.wait(1.0)
    holder.ack(3, [1])
    holder.ack(1, [1])
    assert holder.may_use(9.9)


def test_an_answer_of_a_coordinator_that_does_not_know_our_leases_yet_does_not_lengthen_them(holder):
    holder.wait(1.0)
    holder.ack(1, [], epoch="e2")
    assert holder.held and not holder.may_use(7.0)
    holder.now = 8.0
    (beat,) = holder.hear(msgspec.structs.replace(WELCOME, epoch="e2", answers=2))
    assert not holder.may_use(8.0)
    holder.ack(beat.beat, [1], epoch="e2")
    assert holder.may_use(8.0)


def test_a_job_that_is_over_may_use_nothing(holder):
    holder.hear(m.JobEnded(reason="evicted"))
    assert not holder.may_use(0.0)


def test_an_answer_to_a_registration_from_before_a_restart_asserts_nothing(holder):
    (again,) = holder.hear(msgspec.structs.replace(WELCOME, epoch="e2", answers=1))
    assert (again.number, [claim.token for claim in again.held]) == (2, [1])


@pytest.mark.parametrize("is_registered", [True, False], ids=["after", "while it registers again"])
def test_a_late_grant_from_before_a_restart_is_none(talk, is_registered):
    talk.request("k", "rollout", 1, ["r0"])
    talk.hear(m.Unknown())
    if is_registered:
        talk.hear(msgspec.structs.replace(WELCOME, epoch="e2", answers=2))
    assert talk.grant() == []
    assert not talk.held and not talk.is_over("k")
    talk.hear(msgspec.structs.replace(WELCOME, epoch="e2", answers=2))
    talk.grant(token=2, epoch="e2")
    assert list(talk.held) == [2] and talk.is_over("k")


def test_a_request_waits_until_what_was_given_back_before_it_has_arrived(holder):
    holder.release(1)
    holder.said()
    holder.request("k2", "rollout", 2, ["r0"])
    (beat,) = holder.wait()
    assert kinds(holder.ack(beat.beat)) == [m.LeaseRelease]
    assert kinds(holder.hear(m.LeaseReleased(token=1))) == [m.LeaseRequest]


def test_only_a_registration_that_is_refused_ends_a_job(holder):
    holder.hear(m.Refused(about="register", reason="another connection's message"))
    assert holder.ended is None
    holder.hear(m.Unknown())
    holder.hear(m.Refused(about="register", reason="given up"))
    assert holder.ended == "given up"
