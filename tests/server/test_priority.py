"""Who is served first, over HTTP: case B-37, FEATURES S44."""

from __future__ import annotations

import threading
import time

import pytest

from tests.server.running import Running


@pytest.mark.parametrize("order", ["low-first", "high-first"])
def test_b37_an_urgent_request_does_not_wait(order: str) -> None:
    """With one seat: the urgent one first, then the two of equal rank as they came, the long one last and right."""
    options = ("--scheduling-policy", "priority", "--priority-order", order, "--max-num-seqs", "1")
    sign = 1 if order == "low-first" else -1
    with Running(*options, fake="fake:5") as server:
        assert order in server.text  # said at the start
        card = server.call("/v1/models").json["data"][0]
        assert (card["scheduling_policy"], card["priority_order"]) == ("priority", order)
        want = server.complete("long", max_tokens=200, ignore_eos=True).json["choices"]
        ended: list[str] = []

        def ask(name: str, tokens: int, priority: int) -> None:
            reply = server.complete(name, max_tokens=tokens, ignore_eos=True, priority=sign * priority)
            ended.append(name)
            if name == "long":
                assert reply.json["choices"] == want

        threads = [threading.Thread(target=ask, args=("long", 200, 10))]
        threads[0].start()
        server.until(lambda found: found["octavo:num_requests_running"] == 1)
        for name, priority in (("a", 5), ("urgent", 0), ("b", 5)):
            threads.append(threading.Thread(target=ask, args=(name, 60, priority)))
            threads[-1].start()
            time.sleep(0.03)
        for thread in threads:
            thread.join()
        assert ended == ["urgent", "a", "b", "long"] or ended == ["a", "urgent", "b", "long"]
        assert ended.index("urgent") <= 1  # "a" had the seat for a moment, and may end what it began
