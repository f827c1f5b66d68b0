"""Two jobs on real sockets, host memory for one: who comes later waits, the other is asked to leave, and waits in its turn."""

from __future__ import annotations

import concurrent.futures
import time

GB = 10**9
POOLS = {
    "rollout": {"nodes": [{"name": "r0", "host_bytes": 10 * GB}]},
    "train": {"nodes": [{"name": "t0", "host_bytes": 10 * GB}]},
}
NEEDS = {"host_memory": {"train": {"parameters": 7 * GB}}, "movable": True, "gpus": {}}


def test_a_job_waits_for_room_and_gets_it_when_another_has_left_for_it(serve, join):
    coordinator = serve(pools=POOLS, evict_to_disk_after=0.1)
    first = join(coordinator, "a", **NEEDS)
    first.release(first.acquire("train", step=1))
    looks = join(coordinator, "b", wait=False, **NEEDS)
    assert looks.nodes == {"rollout": ["r0"], "train": ["t0"]}
    looks.close()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waits = pool.submit(join, coordinator, "b", **NEEDS)
        deadline = time.monotonic() + 60
        step = 2
        while not first.move:
            assert time.monotonic() < deadline and not waits.done()
            first.release(first.acquire("train", step=step))
            step += 1
        first.leave_to_move(first.move, step - 1, 0.1)
        second = waits.result(60)
        assert second.acquire("train", step=1).nodes == ["t0"]
        comes_back = pool.submit(join, coordinator, "a", **NEEDS)
        while list(coordinator.snapshot()["host_rooms"]["waiting"]) != ["a"]:
            assert time.monotonic() < deadline and not comes_back.done()
            time.sleep(0.01)
        second.close()
        assert comes_back.result(60).nodes["train"] == ["t0"]
    assert coordinator.snapshot()["host_rooms"]["evicted"] == 1
