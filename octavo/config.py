"""What the user wishes, and what the engine makes of it.

Four frozen dataclasses hold the wishes; every field's text is its help on the command line, and flags have vLLM's
names where the meaning is the same. `resolve` turns wishes, the machine and the model into `Facts`: pure, so that
the same input gives the same numbers anywhere, and so that they can be printed before anything is loaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

from octavo.errors import ConfigError

GIB = 1 << 30
PRIORITY_ORDERS = ("high-first", "low-first")
BLOCK_SIZES = (8, 16, 32, 64, 128)
DTYPES = {
    "auto": "",
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
    "float64": "float64",
}


def option(default: Any, text: str) -> Any:
    """A dataclass field with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how its weights are held."""

    model: str | None = option(None, "folder, .gguf file or hub id; the embedded SmolLM2-135M-Instruct if left out")
    revision: str | None = option(None, "branch, tag or commit of a hub model")
    dtype: str = option("auto", f"weights and KV cache: {', '.join(DTYPES)}; auto is as stored")
    max_model_len: int | None = option(None, "longest sequence in tokens, prompt and output; what fits if left out")
    quantization: str | None = option(
        None, "fp8, int8 or int4: quantise plain weights while loading; quantised checkpoints are recognised"
    )
    load_format: str = option("auto", "auto, or dummy for seeded random weights (config.json is enough)")
    device: str = option("auto", "cpu, cuda, torch-cpu (the CPU without native kernels), or auto")
    enforce_eager: bool = option(False, "launch every kernel by itself instead of replaying captured CUDA graphs")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | str = option(16, f"tokens of one KV block: {', '.join(map(str, BLOCK_SIZES))}")
    kv_cache_memory_bytes: int | None = option(None, "bytes of the KV cache; a share of the free memory if left out")
    kv_cache_dtype: str = option("auto", "auto: as the weights; fp8: e4m3, half the bytes; int8: native CPU only")
    kv_check: bool = option(False, "compare an FP8 KV cache with a plain one on a text at start; refuse if it is off")
    gpu_memory_utilization: float = option(0.9, "share of the card's memory for weights, steps and KV cache")
    num_gpu_blocks_override: int | None = option(None, "number of KV blocks, whatever memory there is")
    enable_prefix_caching: bool = option(True, "reuse the KV of equal prompt beginnings")
    swap_space: float = option(0.0, "GiB of host memory for the KV of sequences that give way; 0: compute it again")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How many sequences, how many tokens at a time."""

    max_num_seqs: int | None = option(None, "most sequences that run at a time")
    max_num_batched_tokens: int | None = option(None, "most tokens of one step")
    scheduling_policy: str = option("fcfs", "who is served next: fcfs, priority, or fair (equal shares for each key)")
    priority_order: str = option("high-first", "high-first: a larger priority is served earlier; or low-first")
    depth: int | None = option(None, "steps in flight before results are read: 0, 1 or 2")
    max_num_queued_reqs: int | None = option(
        None, "sequences that may wait beside those that run; others are refused; 1024 in a server, else any number"
    )
    max_num_queued_tokens: int | None = option(None, "prompt tokens that may wait; any number if left out")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Several devices."""

    tensor_parallel_size: int = option(1, "devices that share every layer; only 1 is built so far")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All wishes about one engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP server around one engine."""

    host: str = option("127.0.0.1", "address to listen on; one that other machines reach needs a key")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    served_model_name: str | None = option(None, "names it answers to, separated by commas; its own if left out")
    api_key: str | None = option(None, "keys that requests must carry, separated by commas; or OCTAVO_API_KEY")
    api_key_file: str | None = option(None, "file with further keys, one a line")
    admin_key: str | None = option(
        None, "key for /metrics and /debug; a sole API key if left out; or OCTAVO_ADMIN_KEY"
    )
    insecure_no_auth: bool = option(False, "listen to other machines without any key")
    default_timeout: float = option(0.0, "seconds until a request ends with 504; 0: no limit; timeout_s overrides")
    shutdown_timeout: float = option(30.0, "seconds that running requests have to end after SIGTERM")
    watchdog_timeout: float = option(120.0, "seconds without a sign of life after which the engine is ended")
    supervise: bool = option(False, "start the engine again when it dies, instead of exiting with code 4")
    stream_interval: int = option(1, "tokens of one streamed event; the first and the last never wait")
    chat_template: str | None = option(None, "file with a chat template instead of the model's own")
    trust_request_chat_template: bool = option(False, "let requests bring chat templates (run in the sandbox)")
    legacy_metrics: bool = option(False, "show metrics under names of old guides too")


PARTS: tuple[tuple[str, type], ...] = (
    ("model", ModelConfig),
    ("cache", CacheConfig),
    ("scheduler", SchedulerConfig),
    ("parallel", ParallelConfig),
)

# Spellings of other engines that are understood: what is said about them.
NOTICES = {
    "continuous_batching": "Batching is always continuous; the option is ignored.",
    "use_v2_block_manager": "There is one block manager; the option is ignored.",
    "enable_chunked_prefill": "Long prompts are always computed in chunks; the option is ignored.",
    "chunk_size": "Streams send every token; how many go into one event is --stream-interval of the server.",
    "streaming": "LLM.stream streams, and so does the server for requests with stream=true; the option is ignored.",
    "disable_log_stats": "Figures are on the metrics page; the option is ignored.",
    "disable_log_requests": "Requests are not logged; the option is ignored.",
    "trust_remote_code": "Octavo never runs code of a model; the option is ignored.",
    "tokenizer_mode": "There is one kind of tokenizer, the fast one; the option is ignored.",
    "max_seq_len_to_capture": "Graphs are captured for numbers of sequences, not for lengths; the option is ignored.",
    "num_scheduler_steps": "Every step is scheduled while the one before it runs; the option is ignored.",
}

NOTICES_WITH_VALUE = ("chunk_size", "tokenizer_mode", "max_seq_len_to_capture", "num_scheduler_steps")  # not flags


def engine_config(**options: Any) -> tuple[EngineConfig, list[str]]:
    """An `EngineConfig` from flat options, and notices about spellings that mean nothing here.

    Raises ConfigError for an option that does not exist.
    """
    notices = [f"{name}: {NOTICES[name]}" for name in options if name in NOTICES]
    if isinstance(options.get("block_size"), str):
        notices.append("block_size: Blocks are counted in tokens; the nearest block of this many bytes is taken.")
    parts: dict[str, Any] = {}
    known: list[str] = []
    for part, cls in PARTS:
        names = [f.name for f in fields(cls)]
        known += names
        parts[part] = cls(**{name: options[name] for name in names if name in options})
    unknown = [name for name in options if name not in known and name not in NOTICES]
    if unknown:
        raise ConfigError(f"Unknown option {unknown[0]!r}.", f"Options: {', '.join(sorted(known))}.")
    return EngineConfig(**parts), notices


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `resolve` must know of a model: the longest sequence it was made for, and bytes of K and V per token.

    parameters: weights that one token meets, to know what computing it costs.
    """

    max_positions: int
    kv_bytes_per_token: int
    dtype: str
    parameters: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """What `resolve` must know of the machine. `free_bytes`: memory of the device after the weights are loaded."""

    device: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """The numbers an engine runs with. `blocks` counts the padding block.

    swap_blocks: KV blocks of host memory; 0 also where moving a block takes longer than computing it again.
    swap_cost: tokens that could be computed while a block goes there and comes back.
    """

    device: str
    dtype: str
    block_size: int
    blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    depth: int
    prefix_cache: bool
    watermark: int
    policy: str
    low_first: bool
    kv_bytes_per_block: int
    swap_blocks: int
    swap_cost: float
    queued_reqs: int | None = None
    queued_tokens: int | None = None

    def line(self) -> str:
        """One line for the log at start."""
        tokens = (self.blocks - 1) * self.block_size
        memory = self.blocks * self.kv_bytes_per_block / GIB
        return (
            f"{self.device}, {self.dtype}; KV cache {self.blocks - 1} blocks of {self.block_size} = {tokens} tokens "
            f"({memory:.2f} GiB); sequences of up to {self.max_model_len} tokens, {self.max_num_seqs} at a time; "
            f"{self.max_num_batched_tokens} tokens a step; depth {self.depth}; "
            f"prefix cache {'on' if self.prefix_cache else 'off'}; "
            + (f"{self.swap_blocks} blocks of host memory; " if self.swap_blocks else "")
            + f"served {self.policy}"
            + (f", {PRIORITY_ORDERS[self.low_first]}" if self.policy == "priority" else "")
        )


# Floating point operations that a device does while one byte crosses between its memory and the host's. CUDA: about
# 400 Tflop/s of large matrix products, 50 GB/s of PCIe 5; with both slower on smaller cards the ratio is much the
# same. CPU: some 100 Gflop/s, and 4 GB/s of copying.
FLOPS_PER_BYTE = {"cuda": 8000.0, "cpu": 25.0}

# Defaults by device: sequences at a time, tokens a step, depth, share of the free memory for KV, most bytes for KV.
_DEFAULTS = {"cpu": (64, 512, 0, 0.25, 4 * GIB), "cuda": (1024, 8192, 1, 1.0, 1 << 50)}


def step_limits(wish: EngineConfig, device: str) -> tuple[int, int]:
    """(sequences, tokens) that a step may have, as wished or as the device has them. ConfigError: less than 1."""
    seqs = _at_least(1, "max_num_seqs", wish.scheduler.max_num_seqs, _DEFAULTS[device][0])
    tokens = wish.scheduler.max_num_batched_tokens
    return seqs, _at_least(1, "max_num_batched_tokens", tokens, max(_DEFAULTS[device][1], seqs))


def resolve(wish: EngineConfig, hardware: Hardware, model: ModelFacts) -> Facts:
    """Numbers for an engine from wishes, machine and model. Raises ConfigError where they do not fit together."""
    _, _, depth, share, most = _DEFAULTS[hardware.device]
    seqs, tokens = step_limits(wish, hardware.device)
    depth = _at_least(0, "depth", wish.scheduler.depth, depth)
    if depth > 2:
        raise ConfigError(f"depth is {depth}.", "Give 0, 1 or 2.")
    if wish.parallel.tensor_parallel_size != 1:
        raise ConfigError(f"tensor_parallel_size is {wish.parallel.tensor_parallel_size}.", "Only 1 is built so far.")
    size = block_tokens(wish.cache.block_size, model.kv_bytes_per_token)
    wished_len = wish.model.max_model_len
    if wished_len is not None and not 1 < wished_len <= model.max_positions:
        raise ConfigError(
            f"max_model_len is {wished_len}; the model was made for up to {model.max_positions} positions.",
            f"Give 2 to {model.max_positions}.",
        )
    longest = wished_len or model.max_positions
    per_block = model.kv_bytes_per_token * size
    cost = swap_cost(hardware.device, per_block, model.parameters)
    blocks = _blocks(wish.cache, per_block, hardware, share, most, -(-longest // size) * seqs)
    if wished_len is None:
        longest = min(longest, (blocks - 1) * size)
    if longest > (blocks - 1) * size:
        raise ConfigError(
            f"A sequence of {longest} tokens (max_model_len) needs {-(-longest // size)} KV blocks; the cache has "
            f"{blocks - 1} ({blocks * per_block / GIB:.2f} GiB).",
            f"Lower --max-model-len to {(blocks - 1) * size}, or raise --kv-cache-memory-bytes.",
        )
    return Facts(
        device=hardware.device,
        dtype=model.dtype,
        block_size=size,
        blocks=blocks,
        max_model_len=longest,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        depth=depth,
        prefix_cache=wish.cache.enable_prefix_caching,
        watermark=(blocks - 1) // 100,
        policy=_one_of("scheduling_policy", wish.scheduler.scheduling_policy, ("fcfs", "priority", "fair")),
        low_first=_one_of("priority_order", wish.scheduler.priority_order, PRIORITY_ORDERS) == "low-first",
        kv_bytes_per_block=per_block,
        swap_blocks=_swap_blocks(wish.cache.swap_space, per_block, size, cost),
        swap_cost=cost,
        queued_reqs=_cap("max_num_queued_reqs", wish.scheduler.max_num_queued_reqs, 0),
        queued_tokens=_cap("max_num_queued_tokens", wish.scheduler.max_num_queued_tokens, 1),
    )


def swap_cost(device: str, block_bytes: int, parameters: int) -> float:
    """Tokens that could be computed while one KV block of `block_bytes` goes to the host and comes back.

    A token takes about two operations for each of the model's `parameters`.
    """
    return block_bytes * FLOPS_PER_BYTE[device] / max(parameters, 1)


def _swap_blocks(gib: float, per_block: int, size: int, cost: float) -> int:
    """KV blocks of host memory: as wished, none when swapping would never be the cheaper way."""
    if isinstance(gib, bool) or not 0.0 <= gib <= 1 << 20:
        raise ConfigError(f"swap_space is {gib}.", "Give the GiB of host memory for swapped KV blocks; 0 for none.")
    return int(gib * GIB) // per_block if cost < size else 0


def block_tokens(wish: int | str, token_bytes: int) -> int:
    """The block size in tokens. For a size in bytes, as in old guides, the largest block that is not larger."""
    match = re.fullmatch(r"(\d{1,6}) *(K|M|G)I?B", str(wish).upper())
    if match is not None:
        wished = int(match[1]) << {"K": 10, "M": 20, "G": 30}[match[2]]
        return max((size for size in BLOCK_SIZES if size * token_bytes <= wished), default=BLOCK_SIZES[0])
    if isinstance(wish, bool) or wish not in BLOCK_SIZES:
        raise ConfigError(f"block_size is {wish}.", f"Give one of {', '.join(map(str, BLOCK_SIZES))} (tokens).")
    return int(wish)


def _one_of(name: str, value: str, values: tuple[str, ...]) -> str:
    if value not in values:
        raise ConfigError(f"{name} is {value!r}.", f"Give one of {', '.join(values)}.")
    return value


def _cap(name: str, wish: int | None, low: int) -> int | None:
    return None if wish is None else _at_least(low, name, wish, 0)


def _at_least(low: int, name: str, wish: int | None, default: int) -> int:
    value = default if wish is None else wish
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} is {value!r}.", f"Give an integer of at least {low}.")
    return value


def _blocks(cache: CacheConfig, per_block: int, hardware: Hardware, share: float, most: int, useful: int) -> int:
    """Blocks of the pool with the padding block: as wished, else a share of what is free, at most `useful`."""
    if cache.num_gpu_blocks_override is not None:
        return _at_least(1, "num_gpu_blocks_override", cache.num_gpu_blocks_override, 0) + 1
    if cache.kv_cache_memory_bytes is not None:
        blocks = _at_least(1, "kv_cache_memory_bytes", cache.kv_cache_memory_bytes, 0) // per_block
    else:
        blocks = min(int(min(hardware.free_bytes * share, most)) // per_block, useful + 1)
    if blocks < 2:
        raise ConfigError(
            f"There is room for {max(blocks, 0)} KV blocks of {per_block} bytes; at least 2 are needed.",
            "Raise --kv-cache-memory-bytes, or take a smaller --block-size.",
        )
    return blocks
