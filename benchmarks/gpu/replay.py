"""Time of a kernel: replays of a captured graph."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch


class Slice:
    """With `--compile I/N` every N-th configuration is only compiled, for a later run to find in Triton's cache."""

    part, parts, seen = 0, 0, 0

    @classmethod
    def from_command_line(cls) -> None:
        """Read the option."""
        if "--compile" in sys.argv:
            cls.part, cls.parts = (int(n) for n in sys.argv[sys.argv.index("--compile") + 1].split("/"))


def timed(function: Callable[[int], object], launches: int) -> float:
    """Seconds of one call, the median of seven replays of `launches`; `function` takes the number of the launch."""
    if Slice.parts:
        Slice.seen += 1
        if Slice.seen % Slice.parts == Slice.part:
            function(0)
        return 1.0
    for _ in range(2):
        function(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            function(i)
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / launches / 1e3)
    return sorted(times)[3]
