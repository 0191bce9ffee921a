"""What a server counts, under Octavo's names, vLLM's names, and, if wished, the names of old guides.

docs/metrics.md explains every name. Times are seconds; shares are 0 to 1.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from octavo.metrics.registry import Counter, Gauge, Histogram, Metric, escape, render
from octavo.metrics.ring import Ring
from octavo.types import RequestMetrics

REASONS = ("stop", "length", "repetition", "timeout", "abort", "error")
REFUSALS = ("queue_full", "draining", "not_ready", "other")
STATUSES = ("1xx", "2xx", "3xx", "4xx", "5xx", "other")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 80, 160)
_SHORT = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    1, 2.5, 5,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class EngineNumbers(msgspec.Struct, frozen=True):
    """What the engine reports of itself: gauges as they are now, `counters` since its start.

    cached_blocks: known to the prefix index. live_tokens: tokens whose K and V lie in `used_blocks`. step_seconds: of
    the last step. full_step_seconds: what a step of the most tokens is expected to take.
    """

    running: int
    waiting: int
    total_blocks: int
    used_blocks: int
    cached_blocks: int
    live_tokens: int
    step_seconds: float
    counters: dict[str, int]
    full_step_seconds: float = 0.0


class ServerMetrics:
    """The server's numbers. `beat`, `tokens`, `ended` ... are called by the event loop."""

    def __init__(self, legacy: bool = False) -> None:
        self.legacy = legacy
        self.ring = Ring()
        self.block_size = 0
        self.config: Mapping[str, str] = {}
        self._labels = 'model_name="",engine="0"'
        self._beat: EngineNumbers | None = None
        self._engine = dict.fromkeys(_ENGINE_COUNTERS, 0.0)
        self._base: dict[str, float] = {}
        self.prompt_tokens = Counter("prompt_tokens_total", "Prompt tokens of requests that got a first token.")
        self.generation_tokens = Counter("generation_tokens_total", "Generated tokens.")
        self.success = Counter("request_success_total", "Ended requests.", "finished_reason", REASONS)
        self.refusals = Counter("request_refusals_total", "Requests refused for load.", "reason", REFUSALS)
        self.http = Counter("http_responses_total", "HTTP responses by class of status.", "status", STATUSES)
        self.restarts = Counter("engine_restarts_total", "Times the engine process was started again.")
        self.ttft = Histogram("time_to_first_token_seconds", "From submission to the first token.", _SECONDS)
        self.itl = Histogram("inter_token_latency_seconds", "Between tokens of one sequence.", _SHORT)
        self.tpot = Histogram(
            "request_time_per_output_token_seconds", "Mean per sequence, first token left out.", _SHORT
        )
        self.e2e = Histogram("e2e_request_latency_seconds", "From submission to the end.", _SECONDS)
        self.queue = Histogram("request_queue_time_seconds", "From submission until the engine began.", _SECONDS)
        self.prefill = Histogram("request_prefill_time_seconds", "From there to the first token.", _SECONDS)
        self.decode = Histogram("request_decode_time_seconds", "From the first token to the last.", _SECONDS)
        self.request_prompt = Histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_generation = Histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)

    def name(self, model: str, block_size: int, config: Mapping[str, str]) -> None:
        """The labels of all series, once the engine is known."""
        self._labels = f'model_name="{escape(model)}",engine="0"'
        self.block_size = block_size
        self.config = config

    def beat(self, beat: EngineNumbers) -> None:
        """Take in the engine's numbers; its counters start again at 0 when it is started again."""
        for name, value in beat.counters.items():
            if value + self._base.get(name, 0.0) < self._engine.get(name, 0.0):
                self._base[name] = self._engine[name]
            self._engine[name] = value + self._base.get(name, 0.0)
        self._beat = beat
        engine = self._engine
        self.ring.add(
            time.monotonic(), beat.running, beat.waiting, beat.used_blocks, beat.cached_blocks,
            engine["generated_tokens"], engine["prompt_tokens"], engine["prefix_hit_tokens"], beat.step_seconds,
        )  # fmt: skip

    def lost(self) -> None:
        """The engine is gone: nothing runs and nothing waits."""
        self._beat = None

    def first(self, count: int, prompt: int, since_arrival: float) -> None:
        """A request got its first `count` tokens, one for each of its sequences; `prompt` is the prompt's length."""
        self.generation_tokens.add(count)
        self.prompt_tokens.add(prompt)
        self.ttft.observe(since_arrival)

    def more(self, count: int, since_last: float) -> None:
        """Sequences got `count` more tokens, `since_last` seconds after the ones before."""
        self.generation_tokens.add(count)
        self.itl.observe(since_last, count)

    def ended(self, reason: str, prompt: int, tokens: int, seconds: float, paces: Sequence[float]) -> None:
        """One request of the engine is over. `paces`: seconds for each token after the first, by sequence."""
        self.success.add(1, reason)
        self.e2e.observe(seconds)
        if tokens:
            self.request_prompt.observe(prompt)
            self.request_generation.observe(tokens)
        for pace in paces:
            self.tpot.observe(pace)

    def phases(self, found: RequestMetrics) -> None:
        """Where the time of a request went that is over."""
        for histogram, seconds in (
            (self.queue, found.time_in_queue),
            (self.prefill, found.prefill_time),
            (self.decode, found.decode_time),
        ):
            if seconds is not None:
                histogram.observe(max(seconds, 0.0))

    def refused(self, reason: str) -> None:
        """A request was refused for load."""
        self.refusals.add(1, reason)

    def text(self) -> str:
        """Everything in Prometheus' format."""
        own = self._own()
        parts = [render(own, "octavo:", self._labels), render(own, "vllm:", self._labels), self._info()]
        if self.legacy:
            parts.append(render(self._old(), "", self._labels))
        return "".join(parts)

    def _read(self, name: str) -> float:
        return float(getattr(self._beat, name)) if self._beat is not None else 0.0

    def _usage(self) -> float:
        return self._read("used_blocks") / max(self._read("total_blocks"), 1.0)

    def _fill(self) -> float:
        return self._read("used_blocks") * self.block_size / max(self._read("live_tokens"), 1.0)

    def _own(self) -> list[Metric]:
        engine: list[Metric] = []
        for source, (name, text) in _ENGINE_COUNTERS.items():
            counter = Counter(name, text)
            counter.add(self._engine[source])
            engine.append(counter)
        return [
            Gauge("num_requests_running", "Sequences that the engine runs.", lambda: self._read("running")),
            Gauge("num_requests_waiting", "Sequences that wait for the engine.", lambda: self._read("waiting")),
            Gauge("kv_cache_usage_perc", "Share of the KV blocks that sequences hold.", self._usage),
            Gauge("kv_block_fill_ratio", "Token slots in held blocks for each live token.", self._fill),
            Gauge("kv_blocks_cached", "KV blocks known to the prefix index.", lambda: self._read("cached_blocks")),
            Gauge("engine_up", "1 while the engine runs.", lambda: float(self._beat is not None)),
            Gauge("engine_step_seconds", "Duration of the last step.", lambda: self._read("step_seconds")),
            *engine, self.prompt_tokens, self.generation_tokens, self.success, self.refusals, self.http,
            self.restarts, self.ttft, self.itl, self.tpot, self.e2e, self.queue, self.prefill, self.decode,
            self.request_prompt, self.request_generation,
        ]  # fmt: skip

    def _info(self) -> str:
        lines = []
        for prefix in ("octavo:", "vllm:"):
            own = "".join(f',{name}="{escape(value)}"' for name, value in self.config.items())
            lines += [
                f"# HELP {prefix}cache_config_info What the KV cache is set to; always 1.",
                f"# TYPE {prefix}cache_config_info gauge",
                f"{prefix}cache_config_info{{{self._labels}{own}}} 1",
            ]
        return "\n".join(lines) + "\n"

    def _old(self) -> list[Metric]:
        """Names of old guides, with the nearest true number."""
        return [
            Gauge("vllm:gpu_memory_utilization", "Old name: kv_cache_usage_perc.", self._usage),
            Gauge("vllm:gpu_cache_usage_perc", "Old name: kv_cache_usage_perc.", self._usage),
            Gauge("vllm:memory_fragmentation_ratio", "Old name: kv_block_fill_ratio.", self._fill),
            Gauge("avg_time_per_token_ms", "Old name: median of inter_token_latency_seconds.", self._median_ms),
            Gauge("vllm:avg_time_per_token_ms", "Old name: median of inter_token_latency_seconds.", self._median_ms),
            Gauge("memory_fragmentation_ratio", "Old name: kv_block_fill_ratio.", self._fill),
            Gauge("vllm_pending_requests", "Old name: num_requests_waiting.", lambda: self._read("waiting")),
            Gauge("vllm_throughput_tokens", "Generated tokens a second, last 10 s.", self._rate),
            Gauge("vllm_mem_usage", "Old name: kv_cache_usage_perc.", self._usage),
        ]

    def _median_ms(self) -> float:
        return 1000.0 * self.itl.quantile(0.5)

    def _rate(self) -> float:
        return self.ring.rate("generated", 10.0)


# Counter of the engine -> name and text here.
_ENGINE_COUNTERS = {
    "prompt_tokens": ("prefix_cache_queries_total", "Prompt tokens looked up in the prefix index."),
    "prefix_hit_tokens": ("prefix_cache_hits_total", "Prompt tokens found in the prefix index."),
    "prompt_tokens_computed": ("prompt_tokens_computed_total", "Prompt tokens that were computed."),
    "preemptions": ("num_preemptions_total", "Sequences that had to give way."),
    "preempted_tokens": ("preempted_tokens_total", "Computed tokens given up by giving way."),
    "recomputed_tokens": ("recomputed_tokens_total", "Tokens computed again after giving way."),
    "swapped_out_tokens": ("swapped_out_tokens_total", "Computed tokens moved to the host by giving way."),
    "swapped_in_tokens": ("swapped_in_tokens_total", "Computed tokens that came back from the host."),
    "block_copies": ("kv_block_copies_total", "KV blocks copied on write."),
    "evictions": ("kv_block_evictions_total", "Cached KV blocks reused for something else."),
    "steps": ("engine_steps_total", "Steps of the engine."),
    "generated_tokens": ("engine_generated_tokens_total", "Tokens sampled by the engine."),
}
