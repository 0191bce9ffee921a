"""What a simulation is made of: a configuration and events, drawn from a seed or read from a trace.

Everything is decided by one `random.Random(seed)` and by what the world looked like, so a seed gives the same run
anywhere; a trace holds the events themselves and outlives changes to this file.
"""

from __future__ import annotations

from random import Random

import msgspec

from octavo.runner.fake import FAULTS


class SimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One world. `usable` counts blocks without padding; `crowd`: most live requests; the rest are rates per step."""

    block_size: int
    usable: int
    budget: int
    seqs: int
    max_len: int
    vocab: int
    depth: int
    prefix_cache: bool
    watermark: int
    crowd: int
    arrivals: float
    aborts: float
    faults: float
    growth: float = 0.0  # share of requests with a short prompt and a long output
    host_blocks: int = 0
    swap_cost: float = 0.0
    policy: str = "fcfs"
    mixed_prefill: int = 0


class Spec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as a client would make it. `limit`: total tokens at which a sequence ends."""

    prompt: list[int]
    limit: int
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    salt: str = ""
    eos: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int = -1
    priority: int = 0
    tenant: str = ""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A request arrives under the engine's number `id`."""

    id: int
    spec: Spec


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """A client goes away, or is content with one child of its request."""

    id: int
    child: int | None = None


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """The next step fails in one of the ways of `octavo.runner.fake.FAULTS`."""

    kind: str
    victim: int = 0


Event = Submit | Abort | Fault


class Trace(msgspec.Struct, frozen=True):
    """A run that can be replayed: the world, and its events by step."""

    config: SimConfig
    steps: int
    events: list[tuple[int, Event]]
    note: str = ""


def draw_config(rng: Random) -> SimConfig:
    """A world: every seed draws its own mix of sizes, rates and faults (swarm testing)."""
    block_size = rng.choice((1, 2, 2, 4, 4, 8, 16, 32, 64))
    longest = rng.choice((16, 24, 40, 64, 100, 160))
    max_len = max(longest, rng.choice((1, 2, 3)) * block_size)
    columns = -(-max_len // block_size)
    seqs = rng.choice((1, 2, 3, 4, 6, 8, 12))
    usable = max(1, int(columns * 2 ** rng.uniform(0, 2)))
    special = rng.random()
    if special < 0.04:
        usable = rng.randrange(512, 4096)
    elif special < 0.12:  # not every request fits
        usable = max(1, columns // 2)
    return SimConfig(
        block_size=block_size,
        usable=usable,
        budget=int(2 ** rng.uniform(0, 9)),
        seqs=seqs,
        max_len=max_len,
        vocab=rng.choice((8, 50, 300)),
        depth=rng.choice((0, 1, 1, 2)),
        prefix_cache=rng.random() < 0.85,
        watermark=rng.choice((0, 0, 1, usable // 100, usable // 10)),
        crowd=seqs + rng.choice((1, 4, 10)),
        arrivals=2 ** rng.uniform(-3, 0.5),
        aborts=rng.choice((0.0, 0.02, 0.07)),
        faults=rng.choice((0.0, 0.0, 0.0, 0.003, 0.02)),
        growth=rng.choice((0.2, 0.5, 0.9)),
        host_blocks=rng.choice((0, 0, 1, max(1, columns // 2), columns, 3 * columns, usable)),
        swap_cost=rng.choice((0.0, 0.0, 0.25, 0.75)) * block_size,
        policy=rng.choice(("fcfs", "fcfs", "priority", "fair")),
        mixed_prefill=rng.choice((0, 0, 1, 2)),
    )


class Traffic:
    """Events of one step after the other, for a world with `config`."""

    def __init__(self, config: SimConfig, rng: Random) -> None:
        self.config, self.rng = config, rng
        self.families = [self._tokens(config.max_len) for _ in range(rng.choice((1, 2, 4)))]
        self.past: list[Spec] = []  # requests that others repeat or go on from
        self.next_id = 1

    def events(self, live: list[int], finished: list[tuple[int, list[int]]]) -> list[Event]:
        """The events of the next step. live: ids of live requests; finished: whole texts, with their salts' specs."""
        rng, config = self.rng, self.config
        out: list[Event] = []
        rate = config.arrivals
        while rng.random() < rate and len(live) + len(out) < config.crowd:
            out.append(Submit(self.next_id, self._spec(finished)))
            self.next_id += 1
            rate *= 0.7
        if live and rng.random() < config.aborts:
            child = None if rng.random() < 0.7 else rng.randrange(4)
            out.append(Abort(rng.choice(live), child))
        if rng.random() < config.faults:
            out.append(Fault(rng.choice(FAULTS), rng.randrange(64)))
        return out

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.config.vocab) for _ in range(count)]

    def _spec(self, finished: list[tuple[int, list[int]]]) -> Spec:
        rng, config = self.rng, self.config
        prompt, salt = self._prompt(finished)
        grows = rng.random() < config.growth
        if grows:
            prompt = prompt[: 1 + config.max_len // 8]
        room = config.max_len - len(prompt)
        new = rng.choice((1, 2, room, min(room, 1 + int(rng.expovariate(0.05))), 1 + rng.randrange(max(room, 1))))
        ends = rng.sample(range(config.vocab), 5)
        eos = tuple(ends[: rng.choice((0, 1, 1, 1, 2))])
        stop_ids = tuple(ends[2 : rng.choice((2, 2, 2, 3, 5))])
        spec = Spec(
            prompt=prompt,
            limit=len(prompt) + max(1, room if grows else min(new, room)),
            n=rng.choice((1, 1, 1, 1, 1, 1, 2, 3, 4)),
            temperature=rng.choice((0.0, 0.7, 1.0)),
            top_k=rng.choice((0, 5)),
            top_p=rng.choice((1.0, 0.5)),
            seed=rng.getrandbits(64),
            salt=salt,
            eos=eos,
            stop_ids=stop_ids,
            min_tokens=rng.choice((0, 0, 0, 2, 7)),
            logprobs=rng.choice((-1, -1, -1, 0, 2)),
            priority=rng.choice((-1, 0, 0, 0, 1, 5)) if config.policy == "priority" else 0,
            tenant=rng.choice("abbb") if config.policy == "fair" else "",
        )
        if rng.random() < 0.02:
            return self._unservable(spec)
        self.past = [*self.past[-20:], spec]
        return spec

    def _prompt(self, finished: list[tuple[int, list[int]]]) -> tuple[list[int], str]:
        """A prompt and its salt: with a shared beginning, a repetition, the next turn of a talk, or all its own."""
        rng, most = self.rng, self.config.max_len - 1
        salt = rng.choice(("", "", "", "a", "b"))
        kind = rng.random()
        if kind < 0.5:
            size = self.config.block_size
            head = rng.randrange(most + 1)
            if rng.random() < 0.5:
                head = min(most, -(-head // size) * size)
            prompt = rng.choice(self.families)[:head] + self._tokens(rng.choice((0, 0, 1, 3, size)))
        elif kind < 0.62 and self.past:
            past = rng.choice(self.past)
            prompt, salt = list(past.prompt), past.salt
        elif kind < 0.75 and finished:
            which, text = rng.choice(finished)
            prompt = text + self._tokens(rng.randrange(3))
            salt = ("", "a", "b")[which]
        elif kind < 0.82:
            prompt = self._tokens(1)
        elif kind < 0.88:
            prompt = self._tokens(most)
        else:
            prompt = self._tokens(1 + rng.randrange(most))
        return prompt[:most] or self._tokens(1), salt

    def _unservable(self, spec: Spec) -> Spec:
        """Something that has to be refused at once."""
        change = self.rng.choice(("empty", "long", "token", "limit", "n"))
        if change == "empty":
            return msgspec.structs.replace(spec, prompt=[])
        if change == "long":
            return msgspec.structs.replace(spec, prompt=[0] * self.config.max_len, limit=self.config.max_len)
        if change == "token":
            return msgspec.structs.replace(spec, prompt=[*spec.prompt[:-1], self.config.vocab])
        if change == "n":
            return msgspec.structs.replace(spec, n=0)
        return msgspec.structs.replace(spec, limit=self.config.max_len + 1)
