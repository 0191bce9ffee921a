"""`octavo bench online`: load on a running server, as clients see it.

Open loop: requests come at times drawn from a seed (Poisson, or gamma for bursts) whether or not earlier ones are
done, so a slow server builds a queue as it would in life. `--concurrency` is the closed loop: that many clients, each
with one request at a time. A request counts for goodput when its first token and its slowest gap keep the limits.
Workload CS is customer service: a system prompt of 900 tokens that all share, a question of 150 of its own, 100 out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from octavo.bench.plot import cumulative_svg
from octavo.bench.workloads import HIGH, LOW, WORKLOADS, BenchRequest, build
from octavo.errors import ConfigError

SHARES = (50, 90, 99)
CS = (900, 150, 100)  # shared tokens, own tokens, tokens out


@dataclass(slots=True)
class Sample:
    """What one client saw: seconds from sending to the first event, between events, and to the end."""

    status: int = 0
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    prompt: int = 0
    cached: int = 0
    whole: bool = False

    def keeps(self, ttft: float, gap: float) -> bool:
        """Whether the request came to its end within the limits (seconds)."""
        return self.whole and self.ttft <= ttft and max(self.gaps, default=0.0) <= gap


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key", help="its key, if it needs one")
    parser.add_argument("--workload", default="CS", help=f"CS, or one of {', '.join(WORKLOADS)} (default: CS)")
    parser.add_argument("--requests", type=int, default=100, help="how many (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second (default: %(default)s)")
    parser.add_argument(
        "--burstiness", type=float, default=1.0, help="1 is Poisson; less comes in bursts (gamma shape)"
    )
    parser.add_argument("--concurrency", type=int, help="closed loop with so many clients, instead of a rate")
    parser.add_argument("--slo-ttft", type=float, default=1000.0, help="ms to the first token that are good enough")
    parser.add_argument("--slo-itl", type=float, default=200.0, help="ms between tokens that are good enough")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--plot", type=Path, help="write cumulative curves here, as SVG")


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 1 when no request came to its end."""
    requests = make_requests(args.workload, args.requests, args.seed)
    if args.concurrency is None:
        times = arrivals(len(requests), args.rate, args.burstiness, args.seed)
    else:
        times = [0.0] * len(requests)
    begin = time.perf_counter()
    samples = asyncio.run(load(args.url, args.api_key, requests, times, args.concurrency))
    result = summary(samples, time.perf_counter() - begin, args.slo_ttft / 1000, args.slo_itl / 1000)
    show(result)
    if args.json:
        options = {name: str(value) for name, value in vars(args).items() if value is not None and name != "api_key"}
        report = {"command": "octavo bench online", "options": options, "online": result}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report | {"samples": [asdict(s) for s in samples]}) + "\n")
    if args.plot:
        curves = {
            "time to first token": [s.ttft * 1000 for s in samples if s.whole],
            "between tokens": [gap * 1000 for s in samples for gap in s.gaps],
        }
        args.plot.write_text(cumulative_svg(curves, "milliseconds"))
    return 0 if result["completed"] else 1


def make_requests(workload: str, count: int, seed: int) -> list[BenchRequest]:
    """The requests of a workload, repeated with fresh prompts until there are enough."""
    if workload == "CS":
        rng = random.Random(f"CS-{seed}")
        head = [rng.randrange(LOW, HIGH) for _ in range(CS[0])]
        return [BenchRequest(head + [rng.randrange(LOW, HIGH) for _ in range(CS[1])], CS[2]) for _ in range(count)]
    made: list[BenchRequest] = []
    repetition = 1000 * seed
    while len(made) < count:
        made += build(workload, repetition)
        repetition += 1
    return made[:count]


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Times in seconds of `count` arrivals; the gaps are gamma with that shape and mean 1 / rate."""
    if not (rate > 0 and burstiness > 0 and math.isfinite(rate * burstiness)):
        raise ConfigError(f"rate is {rate} and burstiness {burstiness}.", "Give positive numbers.")
    rng = random.Random(seed)
    at, times = 0.0, []
    for _ in range(count):
        at += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(at)
    return times


async def load(
    url: str, key: str | None, requests: list[BenchRequest], times: list[float], concurrency: int | None
) -> list[Sample]:
    """Send every request at its time, or as clients come free, and wait for all."""
    place = urlsplit(url)
    if place.scheme != "http" or place.hostname is None:
        raise ConfigError(f"url is {url!r}.", "Give http://host:port.")
    host, port = place.hostname, place.port or 80
    free = asyncio.Semaphore(concurrency or len(requests))
    begin = time.perf_counter()

    async def one(request: BenchRequest, at: float) -> Sample:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        async with free:
            try:
                return await ask(host, port, key, request)
            except OSError:
                return Sample()

    return await asyncio.gather(*(one(r, at) for r, at in zip(requests, times, strict=True)))


async def ask(host: str, port: int, key: str | None, request: BenchRequest) -> Sample:
    """One streamed completion, measured. Raises OSError when there is no server."""
    body = {
        "prompt": request.ids,
        "max_tokens": request.out,
        "temperature": request.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        f"host: {host}:{port}",
        "connection: close",
        "content-type: application/json",
        f"content-length: {len(data)}",
        *([f"authorization: Bearer {key}"] if key else []),
    ]
    sample = Sample()
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        sample.status = int((await reader.readline()).split(b" ")[1])
        last = begin
        async for event in events(reader):
            now = time.perf_counter()
            if event == b"[DONE]":
                sample.whole = True
            elif event.startswith(b"{"):
                last = _take(sample, json.loads(event), begin, last, now)
        sample.seconds = time.perf_counter() - begin
        sample.tokens = sample.tokens or len(sample.gaps) + bool(sample.ttft)
    finally:
        writer.close()
    return sample


def _take(sample: Sample, event: dict[str, Any], begin: float, last: float, now: float) -> float:
    """Take an event of any OpenAI-compatible server in; returns the time of the last tokens."""
    usage = event.get("usage")
    if usage:
        sample.tokens, sample.prompt = usage["completion_tokens"], usage["prompt_tokens"]
        sample.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    choices = event.get("choices")
    if not choices or (choices[0].get("finish_reason") and not choices[0].get("text")):
        return last
    if last == begin:
        sample.ttft = now - begin
    else:
        sample.gaps.append(now - last)
    return now


async def events(reader: asyncio.StreamReader) -> Any:
    """The data of server-sent events, as they come; the framing of chunks is skipped."""
    while line := await reader.readline():
        if line.startswith(b"data: "):
            yield line[6:].strip()


def summary(samples: list[Sample], seconds: float, slo_ttft: float, slo_itl: float) -> dict[str, Any]:
    """Counts, rates and percentiles (milliseconds) of a run."""
    whole = [s for s in samples if s.whole]
    good = [s for s in whole if s.keeps(slo_ttft, slo_itl)]
    made: dict[str, Any] = {
        "requests": len(samples),
        "completed": len(whole),
        "refused": sum(s.status in (429, 503) for s in samples),
        "failed": sum(not s.whole and s.status not in (429, 503) for s in samples),
        "seconds": round(seconds, 3),
        "request_rate": round(len(whole) / seconds, 3),
        "goodput": round(len(good) / seconds, 3),
        "output_rate": round(sum(s.tokens for s in whole) / seconds, 1),
        "prompt_rate": round(sum(s.prompt for s in whole) / seconds, 1),
        "cached_share": round(sum(s.cached for s in whole) / max(sum(s.prompt for s in whole), 1), 4),
    }
    for name, values in _series(whole):
        for share in SHARES:
            made[f"{name}_p{share}"] = round(percentile(values, share) * 1000, 2)
    return made


def _series(whole: list[Sample]) -> Iterator[tuple[str, list[float]]]:
    yield "ttft", [s.ttft for s in whole]
    yield "itl", [gap for s in whole for gap in s.gaps]
    yield "e2e", [s.seconds for s in whole]


def percentile(values: list[float], share: float) -> float:
    """The smallest value that is not under `share` percent of the values; 0 without any."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share / 100 * len(ordered)) - 1, 0)] if ordered else 0.0


def show(result: dict[str, Any]) -> None:
    """A short table."""
    print(
        f"{result['completed']} of {result['requests']} requests done in {result['seconds']:.1f} s, "
        f"{result['refused']} refused, {result['failed']} failed"
    )
    print(
        f"{result['request_rate']:.2f} requests/s, goodput {result['goodput']:.2f}/s, {result['output_rate']:.1f} "
        f"tokens/s out, {100 * result['cached_share']:.1f} % of the prompts cached"
    )
    print(f"{'ms':6}" + "".join(f"{'p' + str(share):>10}" for share in SHARES))
    for name in ("ttft", "itl", "e2e"):
        print(f"{name:6}" + "".join(f"{result[f'{name}_p{share}']:10.1f}" for share in SHARES))
