"""What every request should produce: the same request alone, computed directly from its own tokens.

No blocks, no cache, no chunks, no preemption, nobody else: only the two functions that say what `FakeRunner`
computes from a history. `Ledger` also knows what every prefix key may stand for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from octavo.bench.sim.case import SimConfig, Spec
from octavo.errors import EngineError
from octavo.runner.fake import START, choose, fingerprint, history_step
from octavo.scheduler.keys import chain_keys, root_key
from octavo.scheduler.records import LENGTH, STOP
from octavo.types import EngineRequest


class Violation(EngineError):
    """The scheduler did what it must not do. An `EngineError`, so that the loop does not take it for a lost step."""


@dataclass(slots=True)
class Expected:
    """One sequence: what it will produce, and how far it has come."""

    spec: Spec
    tokens: list[int]
    reason: int
    got: int = 0
    over: bool = False  # ended, or aborted by its client: no further token may come
    aborted: bool = False
    reported: bool = False


@dataclass(slots=True)
class Ledger:
    """All live sequences by (request, child), and what each key of the prefix index stands for.

    contents: key -> the KV words of its block. salts: key -> salt. roots: keys before the first block.
    """

    config: SimConfig
    live: dict[tuple[int, int], Expected] = field(default_factory=dict)
    contents: dict[bytes, bytes] = field(default_factory=dict)
    salts: dict[bytes, str] = field(default_factory=dict)
    parents: dict[bytes, bytes] = field(default_factory=dict)
    roots: dict[bytes, str] = field(default_factory=dict)

    def request(self, number: int, spec: Spec) -> EngineRequest:
        """The request as the engine's client would build it."""
        size = self.config.block_size
        prompt = np.array(spec.prompt, np.int32)
        root = root_key(size, spec.salt)
        return EngineRequest(
            id=number,
            prompt=prompt.astype("<i4").tobytes(),
            keys=b"".join(chain_keys(root, prompt, size)) if self.config.prefix_cache else b"",
            root=root,
            limit=spec.limit,
            n=spec.n,
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            seed=spec.seed,
            eos=spec.eos,
            stop_ids=spec.stop_ids,
            min_tokens=spec.min_tokens,
            logprobs=spec.logprobs,
            priority=spec.priority,
            tenant=spec.tenant,
        )

    def expect(self, number: int, spec: Spec, root: bytes) -> None:
        """Work out what the children of a request will produce, and which keys that makes."""
        if self.roots.setdefault(root, spec.salt) != spec.salt:
            raise Violation(f"salts {spec.salt!r} and {self.roots[root]!r} have the same root key")
        for child in range(spec.n):
            expected, words = alone(spec, child, self.config)
            self.live[number, child] = expected
            if self.config.prefix_cache:
                self._learn(spec, root, [*spec.prompt, *expected.tokens], words)

    def _learn(self, spec: Spec, root: bytes, tokens: list[int], words: list[int]) -> None:
        size = self.config.block_size
        content = np.array(words, "<u4").tobytes()
        parent = root
        for i, key in enumerate(chain_keys(root, np.array(tokens, np.int32), size)):
            block = content[4 * i * size : 4 * (i + 1) * size]
            if self.contents.setdefault(key, block) != block or self.salts.setdefault(key, spec.salt) != spec.salt:
                raise Violation(f"one key stands for two contents, of salts {spec.salt!r} and {self.salts[key]!r}")
            self.parents[key] = parent
            parent = key


def alone(spec: Spec, child: int, config: SimConfig) -> tuple[Expected, list[int]]:
    """What one child of a request produces on its own, and the KV word of each of its positions."""
    history, words = START, []
    for token in spec.prompt:
        word, history = history_step(history, token)
        words.append(word)
    prompt = len(spec.prompt)
    mark = fingerprint(spec.top_k, spec.temperature, spec.top_p, 0.0, spec.seed, child, prompt)
    ends = frozenset(spec.eos) | frozenset(spec.stop_ids)
    tokens: list[int] = []
    while True:
        banned = ends if len(tokens) < spec.min_tokens else frozenset()
        token = choose(history, mark, banned, config.vocab)
        tokens.append(token)
        word, history = history_step(history, token)
        words.append(word)
        if token in ends:
            return Expected(spec, tokens, STOP), words
        if prompt + len(tokens) >= spec.limit:
            return Expected(spec, tokens, LENGTH), words


def must_refuse(spec: Spec, config: SimConfig) -> bool:
    """Whether a request can never run."""
    prompt = len(spec.prompt)
    return (
        not prompt
        or not all(0 <= token < config.vocab for token in spec.prompt)
        or not prompt < spec.limit <= config.max_len
        or -(-spec.limit // config.block_size) > config.usable
        or spec.n < 1
    )
