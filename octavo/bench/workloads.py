"""Fixed workloads, as lists of requests. Deterministic: the same name and repetition give the same requests.

CPU scale (greedy; token ids are random, which costs an engine the same as text)
  A   1 request, 128 tokens in, 128 out
  B   64 requests, 32..512 in, 32..256 out
  C   32 requests with 1,024 shared and 32 own tokens in, 64 out
  D   48 requests, 128 in, 64 out, Poisson arrivals at 2 a second
GPU scale (temperature 0.6 for W1)
  W1  256 requests, 100..1024 in, 100..1024 out
  W3  32 requests, 4,032 in, 1 out
  W4  256 requests with 3,072 shared and 64 own tokens in, 128 out
  W5  2,048 requests, 32 in, 32 out
Every repetition has fresh prompts of the same sizes, so that a warm prefix cache gives nothing away.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from octavo.errors import ConfigError

LOW, HIGH = 10, 30000  # range of the random token ids; every model that is measured has them


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Token ids in, number of tokens out, temperature, and arrival in seconds after the start."""

    ids: list[int]
    out: int
    temperature: float = 0.0
    at: float = 0.0


def build(name: str, repetition: int = 0) -> list[BenchRequest]:
    """The requests of one workload. ConfigError for a name that does not exist."""
    if name not in WORKLOADS:
        raise ConfigError(f"There is no workload {name!r}.", f"Give one of {', '.join(WORKLOADS)}.")
    return WORKLOADS[name](random.Random(f"{name}-{repetition}"))


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(LOW, HIGH) for _ in range(count)]


def _a(rng: random.Random) -> list[BenchRequest]:
    return [BenchRequest(_ids(rng, 128), 128)]


def _b(rng: random.Random) -> list[BenchRequest]:
    sizes = random.Random(1234)  # the sizes of the published figures
    pairs = [(sizes.randint(32, 512), sizes.randint(32, 256)) for _ in range(64)]
    return [BenchRequest(_ids(rng, prompt), out) for prompt, out in pairs]


def _shared(count: int, shared: int, own: int, out: int) -> Callable[[random.Random], list[BenchRequest]]:
    def make(rng: random.Random) -> list[BenchRequest]:
        head = _ids(rng, shared)
        return [BenchRequest(head + _ids(rng, own), out) for _ in range(count)]

    return make


def _equal(count: int, prompt: int, out: int) -> Callable[[random.Random], list[BenchRequest]]:
    return lambda rng: [BenchRequest(_ids(rng, prompt), out) for _ in range(count)]


def _d(rng: random.Random) -> list[BenchRequest]:
    at, requests = 0.0, []
    for _ in range(48):
        at += rng.expovariate(2.0)
        requests.append(BenchRequest(_ids(rng, 128), 64, at=at))
    return requests


def _w1(rng: random.Random) -> list[BenchRequest]:
    prompts = [_ids(rng, rng.randint(100, 1024)) for _ in range(256)]
    return [BenchRequest(prompt, rng.randint(100, 1024), temperature=0.6) for prompt in prompts]


WORKLOADS: dict[str, Callable[[random.Random], list[BenchRequest]]] = {
    "A": _a,
    "B": _b,
    "C": _shared(32, 1024, 32, 64),
    "D": _d,
    "W1": _w1,
    "W3": _equal(32, 4032, 1),
    "W4": _shared(256, 3072, 64, 128),
    "W5": _equal(2048, 32, 32),
}
