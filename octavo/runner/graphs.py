"""Captured CUDA graphs, by key: the first use of a key captures its function, which later uses only replay.

A function that is captured reads and writes device memory at fixed places only and reads no device value on the
host. What it launches should have been loaded before. All graphs share one memory pool: they run one after the other
on one stream, and what one of them leaves in the pool no other reads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class Graphs:
    """The graphs of one runner. With `enabled` off every function simply runs."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.enabled = enabled and device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        if self.enabled:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def run(self, key: Hashable, function: Callable[[], object]) -> None:
        """Replay the graph of `key`, captured from `function` if there is none."""
        graph = self._graphs.get(key)
        if graph is None:
            if not self.enabled:
                function()
                return
            graph = self.capture(key, function)
        graph.replay()

    def capture(self, key: Hashable, function: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Make the graph of `key` and do not run it. Needs graphs to be enabled."""
        graph = self._graphs[key] = self._capture(function)
        return graph

    def _capture(self, function: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """No call is refused meanwhile, in this thread or others: a kernel may still have to be loaded."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                function()
            finally:
                graph.capture_end()
        return graph

    def clear(self) -> None:
        """Forget all graphs and give their memory back."""
        self._graphs.clear()
        if self.enabled:  # a pool that nobody holds any more cannot be taken up again
            self._pool = torch.cuda.graph_pool_handle()
