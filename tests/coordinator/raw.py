"""A connection to a coordinator by hand, to say what no client of ours says."""

import uuid

import zmq

from verl_mux.coordinator.bus import curve_keys as keys
from verl_mux.coordinator.bus import messages as m


class Stranger:
    """Sends messages or whole frames, and gives the answers."""

    def __init__(self, context, address, identity=None, role=keys.JOB):
        self.identity = identity or f"stranger-{uuid.uuid4().hex}"
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.linger, self.dealer.identity = 0, self.identity.encode()
        keys.for_address(address, None, role).apply(self.dealer)
        self.dealer.connect(address)

    def send(self, *frames):
        self.dealer.send_multipart(list(frames))

    def answer(self):
        assert self.dealer.poll(60_000), "the coordinator does not answer"
        return m.decode(self.dealer.recv())

    def say(self, *messages):
        """Gives what came back before the answer to a status request that is sent after them, and the status."""
        for message in (*messages, m.StatusRequest()):
            self.send(m.encode(message))
        answers = []
        while not answers or not isinstance(answers[-1], m.Status):
            answers.append(self.answer())
        return answers[:-1], answers[-1].snapshot

    def status(self):
        return self.say()[1]
