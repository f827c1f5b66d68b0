"""Event logs of made runs, healthy and with one planted fault. Written from docs/event_log.md and from what the code logs, by
somebody who had not seen how the report judges.

    draw(seed, mode, kind of fault) -> a Run; play(run) simulates it request by request; write(directory, run) puts its log there.

An engine shares itself among the requests in it: a token of each takes `fixed + each * running` seconds. Requests come from
agent loops (turns, tools, reward) on eight workers; the trainer's phases and the turns that jobs take follow from when requests
end. What is drawn of a prompt depends on seed, job and prompt alone, so a run with a fault has the requests of its twin without.
A fault whose steps are not at least a tenth longer than the twin's is made stronger, and drawn anew where that does not help.
"""
