"""The limits of the control bus: what is beyond them is refused before anything of it is kept. Data alone, for messages and
core.

They are far above what jobs need and low enough that no sender costs the coordinator more than a little memory and time. The
limits of one message are part of its types, so decoding checks them.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

FRAME_BYTES = 2**20
# Answers that wait for a client that does not read; further ones are dropped, and it asks again.
QUEUE_PER_CLIENT = 100
# Messages of a client taken off the network before they are read; further ones wait at the client.
UNREAD_PER_CLIENT = 16

JOBS = 20_000
ENDED_JOBS_REMEMBERED = 1_000
CLIENTS_OF_A_JOB = 256
REQUESTS_OF_A_JOB = 64
TAGS_ON_A_NODE = 64

Name = Annotated[str, Meta(max_length=256)]
# Texts that `status` shows hold nothing that terminals act upon (C0, but for tab and newline in texts, DEL, C1) or that turns
# the direction of writing. Checked where they come in: names in a job's other messages must be those it registered.
_ALWAYS_REFUSED = r"\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
PLAIN_NAME = rf"\A[^\x00-\x0a{_ALWAYS_REFUSED}]*\Z"
PLAIN_TEXT = rf"\A[^\x00-\x08{_ALWAYS_REFUSED}]*\Z"
ShownName = Annotated[str, Meta(max_length=256, pattern=PLAIN_NAME)]
Text = Annotated[str, Meta(max_length=4096, pattern=PLAIN_TEXT)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
# The state machine refuses a negative step, in better words.
Step = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
# Tokens count on from the highest that a job claims to hold, so a claim stays far below what a message can carry.
Token = Annotated[int, Meta(ge=0, le=2**62)]
ClaimedToken = Annotated[int, Meta(ge=0, le=2**53)]
Beat = Annotated[int, Meta(ge=0, le=2**53)]
# The sum over all jobs and tags still fits in 63 bits.
Bytes = Annotated[int, Meta(ge=-(2**43), le=2**43)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]  # since 1970; excludes infinity and NaN too
Ticks = Annotated[int, Meta(ge=0, le=2**62)]
Factor = Annotated[float, Meta(ge=0, le=1e6)]

Nodes = Annotated[list[Name], Meta(max_length=4096)]
Sides = Annotated[dict[Name, Nodes], Meta(max_length=8)]
Gpus = Annotated[dict[Name, Count], Meta(max_length=4096)]
Tokens = Annotated[list[Token], Meta(max_length=256)]
Metrics = Annotated[dict[ShownName, float], Meta(max_length=1024)]
Tags = Annotated[dict[ShownName, Bytes], Meta(max_length=TAGS_ON_A_NODE)]
HostMemory = Annotated[dict[Name, dict[ShownName, Annotated[int, Meta(ge=0, le=2**43)]]], Meta(max_length=8)]
