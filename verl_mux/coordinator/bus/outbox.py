"""What a client has to say while nobody is there to hear it: of each thing, only the last word."""

from __future__ import annotations

from verl_mux.coordinator.bus import messages as m

Subject = tuple[object, ...]


class Outbox:
    """Messages in the order in which they are to be sent. A later one about the same thing takes an earlier one's place, so an
    outage of an hour leaves one heartbeat and one progress behind it, not thousands."""

    def __init__(self) -> None:
        self._messages: dict[Subject, m.Message] = {}

    def put(self, message: m.Message) -> None:
        subject = _subject(message)
        self._messages.pop(subject, None)
        self._messages[subject] = message

    def take(self) -> m.Message | None:
        if not self._messages:
            return None
        return self._messages.pop(next(iter(self._messages)))

    def put_back(self, message: m.Message) -> None:
        """What was taken and could not be sent is still the first, unless something newer was said about it meanwhile."""
        self._messages = {_subject(message): message, **self._messages}

    def __len__(self) -> int:
        return len(self._messages)


def _subject(message: m.Message) -> Subject:
    """Questions are told apart by their key or token, steps by their number, reports on memory by what they report on."""
    kind = type(message)
    if isinstance(message, m.MemoryReport):
        return kind, message.node, *message.tags
    if isinstance(message, m.HostReport):
        return kind, message.node
    if isinstance(message, m.Progress):
        return (kind,)
    return kind, *(getattr(message, field, None) for field in ("key", "token", "step"))
