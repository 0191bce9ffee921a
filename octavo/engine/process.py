"""The engine process: `python -m octavo.engine.process FD`, started by `AsyncLLM`, one thread.

FD is an inherited socket that speaks `octavo.engine.wire`. The process lives as long as the socket: when the other
end is gone it ends, and so it ends when the client is killed. It leaves SIGINT and SIGTERM to its parent, and dumps
the stacks of all threads on SIGUSR1. Exit codes: 0 the client closed, 2 configuration, 3 model, 4 engine.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import signal
import socket
import sys
import time
from dataclasses import asdict
from typing import Any

from octavo.engine.build import Engine, build_engine, open_model, with_ends
from octavo.engine.channel import EngineEnd
from octavo.engine.inspect import kv_state
from octavo.engine.wire import (
    Abort,
    Answer,
    Ask,
    Beat,
    Failed,
    Message,
    Ready,
    Refused,
    Start,
    Submit,
    WireError,
    pack,
)
from octavo.env import log_level
from octavo.errors import EngineError, OctavoError, QueueFull, RequestError, invariant
from octavo.metrics.server import EngineNumbers
from octavo.scheduler.usage import usage

_log = logging.getLogger(__name__)

IDLE_BEAT = 1.0  # seconds between signs of life with nothing to do
BUSY_BEAT = 0.1
FIRST_STEP = 150.0  # expected of a step while none has been measured: a large model on a small machine


def main(fd: int) -> int:
    """Run an engine for the client at the other end of `fd`; returns the exit code."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=log_level(), format="%(levelname).1s engine %(name)s: %(message)s")
    channel = EngineEnd(socket.socket(fileno=fd))
    try:
        engine = _start(channel)
        if engine is None:
            return 0
        EngineProcess(engine, channel).run()
        return 0
    except OctavoError as error:
        _log.error("%s", error, exc_info=isinstance(error, EngineError))
        return _give_up(channel, error.exit_code, error.cause, error.fix)
    except Exception as error:
        _log.exception("The engine process failed.")
        return _give_up(channel, 4, f"The engine failed: {type(error).__name__}: {error}.", "See the log.")


def _start(channel: EngineEnd) -> Engine | None:
    """Build the engine that the first message asks for; None when the client closed before."""
    messages: list[Any] = []
    while not messages and not channel.closed:
        messages = channel.receive(60.0)
    if not messages:
        return None
    begin = time.monotonic()
    start = messages[0]
    if not isinstance(start, Start) or len(messages) > 1:
        raise WireError("The first message is not Start.")
    engine = _build(start)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    channel.send(Ready(engine.facts, engine.limits, time.monotonic() - begin))
    channel.flush()
    return engine


def _build(start: Start) -> Engine:
    if start.config.model.load_format.startswith("fake"):
        from octavo.engine.fake import fake_engine

        return fake_engine(start.config, start.eos_ids)
    model = with_ends(open_model(start.config), start.eos_ids)
    return build_engine(start.config, model, steady=True)


def _give_up(channel: EngineEnd, code: int, cause: str, fix: str) -> int:
    channel.send(Failed(code, cause, fix))
    channel.drain(1.0)
    return code


class EngineProcess:
    """Drives one engine for one client until the client is gone. EngineError and WireError end it.

    No sign of life comes while a step runs. So the client is told before the first that there is work, and with every
    beat how long a step may take: as long as the largest so far, for as many tokens as there may be.
    """

    def __init__(self, engine: Engine, channel: EngineEnd) -> None:
        self._engine = engine
        self._channel = channel
        self._step_seconds = 0.0
        self._next_beat = 0.0
        self._said_busy = False
        self._largest = (0, 0.0)  # tokens and seconds of the largest step, the last of that size

    def run(self) -> None:
        """Serve until the client closes."""
        channel, scheduler = self._channel, self._engine.scheduler
        while True:
            for message in channel.receive(0.0 if scheduler.has_work() else IDLE_BEAT):
                self._apply(message)
            if channel.closed:
                return
            self._beat()
            if scheduler.has_work():
                self._step()
                self._beat()
            channel.flush()

    def _beat(self) -> None:
        """Give a sign of life when one is due, and whenever work begins or ends."""
        busy, now = self._engine.scheduler.has_work(), time.monotonic()
        if now >= self._next_beat or busy != self._said_busy:
            self._said_busy = busy
            self._next_beat = now + (BUSY_BEAT if busy else IDLE_BEAT * 0.9)
            self._channel.send(Beat(self._numbers()))
            self._channel.flush()

    def _apply(self, message: Message) -> None:
        scheduler = self._engine.scheduler
        if isinstance(message, Submit):
            try:
                if message.request.beam:  # nobody here would choose how its beams go on
                    raise RequestError("Beam search runs in LLM only.", "Use LLM.beam_search.", "use_beam_search")
                self._engine.loop.submit(message.request)
            except RequestError as error:
                full = isinstance(error, QueueFull)
                self._channel.send(Refused(message.request.id, error.cause, error.fix, error.param, full))
        elif isinstance(message, Abort):
            scheduler.abort(message.id, None if message.child < 0 else message.child)
        elif isinstance(message, Ask):
            self._channel.send(Answer(message.id, kv_state(scheduler.state)))
        else:
            invariant(False, f"{type(message).__name__} comes once, at the start")

    def _step(self) -> None:
        begin, done = time.monotonic(), self._tokens_done()
        for batch in self._engine.loop.step():
            if len(batch.token) or batch.ended:
                self._channel.send(pack(batch))
        self._step_seconds = time.monotonic() - begin
        tokens = self._tokens_done() - done
        if tokens and tokens >= self._largest[0]:
            self._largest = (tokens, self._step_seconds)

    def _tokens_done(self) -> int:
        stats = self._engine.scheduler.stats
        return stats.prompt_tokens_computed + stats.recomputed_tokens + stats.generated_tokens

    def _full_step(self) -> float:
        tokens, seconds = self._largest
        most = self._engine.facts.max_num_batched_tokens
        return seconds * max(most / tokens, 1.0) if tokens else FIRST_STEP

    def _numbers(self) -> EngineNumbers:
        state = self._engine.scheduler.state
        now = usage(state)
        return EngineNumbers(
            running=state.limits.max_num_seqs - len(state.device_rows),
            waiting=len(state.queue),
            total_blocks=state.pool.usable,
            used_blocks=now.blocks,
            cached_blocks=len(state.pool.index),
            live_tokens=now.slots - now.waste,
            step_seconds=self._step_seconds,
            counters=asdict(self._engine.scheduler.stats) | {"evictions": state.pool.evictions},
            full_step_seconds=self._full_step(),
        )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
