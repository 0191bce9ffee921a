"""`LLMEngine`: the engine driven step by step, in vLLM's spelling.

    engine = LLMEngine.from_engine_args(EngineArgs(model="folder, .gguf or hub id"))
    engine.add_request("a", "Hello, my name is", SamplingParams(max_tokens=16))
    while engine.has_unfinished_requests():
        for output in engine.step():
            ...

A thin layer over `LLM`, for scripts that were written for it. Request ids are the caller's; the engine has numbers
of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from octavo.engine.inspect import kv_state
from octavo.engine.llm import LLM, Prompt
from octavo.errors import RequestError
from octavo.scheduler.state import SchedulerState
from octavo.types import RequestOutput, SamplingParams

_log = logging.getLogger(__name__)


class EngineArgs:
    """Options of an engine: the fields of `octavo.config`, by name. Checked when the engine is made."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.model = model
        self.options = options


AsyncEngineArgs = EngineArgs


class BlockManager:
    """Numbers of KV blocks, under the names of vLLM's old block manager. A view: it manages nothing."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    @property
    def num_total_gpu_blocks(self) -> int:
        """Blocks of the pool."""
        return self._state.pool.usable

    def get_num_free_gpu_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._state.pool.free

    def get_num_free_cpu_blocks(self) -> int:
        """Always 0: host memory holds no blocks that are counted here."""
        return 0

    def kv_state(self) -> dict[str, Any]:
        """Everything about the blocks: who holds which, what is shared, what is wasted."""
        return kv_state(self._state)


class SchedulerView:
    """What scripts look for in `engine.scheduler`: the block manager, and how many sequences run and wait."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.block_manager = BlockManager(state)

    def get_num_unfinished_seq_groups(self) -> int:
        """Requests that are not finished."""
        return len(self._state.requests)


class LLMEngine:
    """Requests in, results out, one step at a time; see the module. Not thread-safe."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        """Load a model and start an engine. Raises ConfigError, ModelError."""
        return cls(LLM(args.model, **args.options))

    @property
    def llm_engine(self) -> LLMEngine:
        """This engine: some old scripts expect it one level further down."""
        return self

    @property
    def scheduler(self) -> SchedulerView:
        """A view of the scheduler's numbers."""
        _log.warning("engine.scheduler is a view for old scripts; engine.kv_state() tells more.")
        return SchedulerView(self._llm.engine.scheduler.state)

    def kv_state(self) -> dict[str, Any]:
        """The KV cache now, as plain values; see `octavo.engine.inspect`."""
        return kv_state(self._llm.engine.scheduler.state)

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> None:
        """Queue a request under the caller's own id. RequestError when it cannot be served or the id is taken."""
        if request_id in self._numbers:
            raise RequestError(f"Request {request_id!r} is running already.", "Use another id.", "request_id")
        number = self._llm.open(prompt, params or SamplingParams(), cache_salt)
        self._numbers[request_id], self._names[number] = number, request_id

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Forget requests; unknown ids are ignored."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._llm.drop([self._forget(name) for name in ids if name in self._numbers])

    def _forget(self, name: str) -> int:
        number = self._numbers.pop(name)
        del self._names[number]
        return number

    def has_unfinished_requests(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._numbers)

    def get_num_unfinished_requests(self) -> int:
        """Number of requests that are not finished."""
        return len(self._numbers)

    def step(self) -> list[RequestOutput]:
        """One step; the results of requests that it changed, as they are now, in the order of their arrival."""
        outputs = []
        touched = self._llm.turn() if self._names else set()
        for number in sorted(self._names):
            output = self._llm.result(number)
            if number not in touched and not output.finished:  # finished: while someone else drove the engine
                continue
            output.request_id = self._names[number]
            outputs.append(output)
            if output.finished:
                self._llm.drop([self._forget(self._names[number])])
        return outputs
