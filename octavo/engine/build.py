"""Putting an engine together: files, spec, numbers, runner, scheduler, loop.

Everything that can be refused is refused before weights are read: an unknown architecture, missing or misshapen
tensors, options that do not fit. Heavy imports happen inside, so that naming a wrong model costs nothing.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from octavo.config import DTYPES, GIB, EngineConfig, Facts, Hardware, ModelFacts, resolve
from octavo.engine.client import ModelLimits
from octavo.engine.loop import EngineLoop, QueueCaps
from octavo.errors import ConfigError
from octavo.machine import free_memory
from octavo.quantization.scheme import ONLINE, Scheme, scheme_from_config
from octavo.runner.memory import model_facts
from octavo.scheduler.records import Limits
from octavo.scheduler.scheduler import Scheduler
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.fetch import ModelFiles, open_checkpoint, resolve_model
from octavo.weights.gguf import GgufCheckpoint
from octavo.weights.needs import TensorNeed

if TYPE_CHECKING:
    from octavo.model.spec import ModelSpec
    from octavo.runner.base import Runner
    from octavo.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

# Prompt tokens of one step for each row that decodes in it, where the pace is to be even: see docs/design.md.
MIXED_PREFILL = {"cpu": 2}

_TAGS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose files were found and understood; no weight was read."""

    files: ModelFiles
    spec: ModelSpec
    needs: Sequence[TensorNeed]
    checkpoint: Checkpoint
    eos_ids: tuple[int, ...] = field(default=())
    scheme: Scheme | None = None
    """how the checkpoint is quantised"""


@dataclass(slots=True)
class Engine:
    """A running engine: the numbers it runs with and the loop that drives it."""

    facts: Facts
    limits: ModelLimits
    loop: EngineLoop

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler inside."""
        return self.loop.scheduler

    def close(self) -> None:
        """Free the device's memory."""
        self.loop.runner.close()


def open_model(config: EngineConfig) -> OpenedModel:
    """Find the model, read its configuration, check its tensors. Raises ModelError."""
    from octavo.files import naming, read_json
    from octavo.model.families import spec_from_config
    from octavo.model.gguf_keys import spec_from_gguf
    from octavo.model.spec import weight_needs
    from octavo.weights.load import DummyCheckpoint, check
    from octavo.weights.quantized import QuantizedCheckpoint

    if config.model.load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format is {config.model.load_format!r}.", "Give auto or dummy.")
    dummy = config.model.load_format == "dummy"
    files = resolve_model(config.model.model, config.model.revision, weights=not dummy)
    source: Literal["hf", "gguf"]
    scheme: Scheme | None = None
    if files.kind == "gguf":
        checkpoint: Checkpoint = GgufCheckpoint(files.path)
        with naming(files.path):
            spec = spec_from_gguf(checkpoint.metadata, checkpoint.names())  # type: ignore[attr-defined]
        source = "gguf"
    else:
        config_file, generation = files.path / "config.json", files.path / "generation_config.json"
        ends = read_json(generation).get("eos_token_id") if generation.exists() else None
        with naming(config_file):
            found = read_json(config_file)
            spec = spec_from_config(found, ends)
            scheme = scheme_from_config(found)
        source = "hf"
    needs = weight_needs(spec, source)
    if dummy:
        checkpoint = DummyCheckpoint(needs, _TAGS[run_dtype(config, spec)])
    elif files.kind != "gguf":
        checkpoint = open_checkpoint(files)
    with naming(files.path):
        if scheme is not None and not dummy:
            checkpoint = QuantizedCheckpoint(checkpoint, scheme)
        check(needs, checkpoint)
    online_kind(config, scheme, dummy)
    return OpenedModel(files, spec, needs, checkpoint, spec.eos_ids, scheme)


def online_kind(config: EngineConfig, scheme: Scheme | None, dummy: bool = False) -> str:
    """What plain weights are quantised to while they are loaded; "" when they stay as they are.

    Raises ConfigError for a wish that the checkpoint's own quantisation does not fulfil. Dummy weights have none yet.
    """
    wish = (config.model.quantization or "").replace("_marlin", "")
    if scheme is None:
        if wish and wish not in ONLINE:
            fix = f"Give {', '.join(ONLINE)}, or a checkpoint that is quantised so."
            raise ConfigError(f"quantization is {wish!r}, but the weights are not quantised.", fix)
        return wish
    if wish and wish not in (scheme.method, scheme.kind):
        cause = f"quantization is {wish!r}, but the checkpoint is {scheme.line()}."
        raise ConfigError(cause, "Leave the option out.")
    return scheme.kind if dummy else ""


def with_ends(model: OpenedModel, ids: tuple[int, ...]) -> OpenedModel:
    """The model with the tokenizer's end ids added to its own."""
    return replace(model, eos_ids=tuple(dict.fromkeys((*model.eos_ids, *ids))))


def run_dtype(config: EngineConfig, spec: ModelSpec) -> str:
    """The type of weights and KV cache: as wished, else the checkpoint's own."""
    if config.model.dtype not in DTYPES:
        raise ConfigError(f"dtype is {config.model.dtype!r}.", f"Give one of {', '.join(DTYPES)}.")
    return DTYPES[config.model.dtype] or spec.dtype


def kv_dtype(config: EngineConfig, native: bool) -> str:
    """The type of the KV cache where it is not that of the model: "fp8", "int8" or "". ConfigError: not here."""
    wish = config.cache.kv_cache_dtype
    if wish not in ("auto", "fp8", "fp8_e4m3", "int8"):
        raise ConfigError(f"kv_cache_dtype is {wish!r}.", "Give auto, fp8 or int8.")
    kind = "" if wish == "auto" else wish.removesuffix("_e4m3")
    if kind == "fp8" and native:
        fix = "Give --kv-cache-dtype int8, or --device torch-cpu."
        raise ConfigError("The native CPU engine has no KV cache in FP8.", fix)
    if kind == "int8" and not native:
        raise ConfigError("Only the native CPU engine has a KV cache in int8.", "Give --kv-cache-dtype fp8.")
    if config.cache.kv_check and kind != "fp8":
        raise ConfigError("kv_check compares an FP8 KV cache with a plain one.", "Give --kv-cache-dtype fp8 with it.")
    return kind


def build_engine(config: EngineConfig, model: OpenedModel, *, steady: bool = False) -> Engine:
    """Load the weights and start an engine; `steady` as in `start_engine`. Raises ConfigError, ModelError."""
    spec = model.spec
    dtype = run_dtype(config, spec)
    native = runs_native(config, spec, dtype)
    kv = kv_dtype(config, native)
    facts_of_model = model_facts(spec, dtype, kv)
    _check_swap(config)
    kind = online_kind(config, model.scheme, config.model.load_format == "dummy")
    if native:
        from octavo.runner.native import build_native, held_bytes

        if kind == "fp8":
            fix = "Give --quantization int8, or --device torch-cpu."
            raise ConfigError("The native CPU engine does not quantise weights to FP8.", fix)

        # Refused before loading; the weights will be there when the KV cache fills.
        as_stored = config.model.dtype == "auto"
        held = held_bytes(spec, model.needs, model.checkpoint, kind or dtype, as_stored)
        free = max(0, free_memory() - held)
        facts = resolve(config, Hardware("cpu", free), facts_of_model)
        runner: Runner = build_native(
            spec,
            model.needs,
            model.checkpoint,
            dtype=kind or dtype,
            kv=kv,
            as_stored=as_stored,
            blocks=facts.blocks,
            block_size=facts.block_size,
            rows=facts.max_num_seqs,
            max_len=facts.max_model_len,
            swap_blocks=facts.swap_blocks,
        )
    else:
        runner, facts = _torch_runner(config, model, facts_of_model, kind, kv == "fp8")
    _log.info("%s", facts.line())
    return start_engine(facts, spec.vocab_size, model.eos_ids, runner, steady=steady)


def _check_swap(config: EngineConfig) -> None:
    """Refuse a swap space that the host does not have."""
    free, wish = free_memory(), config.cache.swap_space
    if free and wish * GIB > free:
        raise ConfigError(
            f"swap_space is {wish:g} GiB; the host has {free / GIB:.1f} GiB free.", "Lower --swap-space."
        )


def _torch_runner(
    config: EngineConfig, model: OpenedModel, facts_of_model: ModelFacts, kind: str, fp8_kv: bool
) -> tuple[Runner, Facts]:
    """Captured graphs and Triton kernels on CUDA, else torch's own operations."""
    from octavo.runner.build import build_decoder, pick_device, torch_dtype
    from octavo.runner.kv_scales import KvScales
    from octavo.runner.torch_runner import TorchRunner

    kv = KvScales(model.checkpoint, partial(held_ids, model), config.cache.kv_check) if fp8_kv else None
    device = pick_device(config.model.device)
    if device.type == "cuda" and facts_of_model.dtype != "float64" and importlib.util.find_spec("triton") is not None:
        from octavo.runner.startup import build_cuda

        return build_cuda(config, model.spec, model.needs, model.checkpoint, facts_of_model, kind, kv)
    resolve(config, Hardware(device.type, free_memory()), facts_of_model)  # refuse before loading
    dtype = torch_dtype(facts_of_model.dtype)
    decoder = build_decoder(model.spec, model.needs, model.checkpoint, dtype, device, kind, fp8_kv)
    if kv is not None:
        kv.give(decoder)
    facts = resolve(config, Hardware(device.type, free_memory()), facts_of_model)
    runner = TorchRunner(
        decoder,
        blocks=facts.blocks,
        block_size=facts.block_size,
        rows=facts.max_num_seqs,
        max_len=facts.max_model_len,
        swap_blocks=facts.swap_blocks,
    )
    return runner, facts


def tokenizer_of(model: OpenedModel) -> Tokenizer:
    """The tokenizer that belongs to a model. Raises ModelError."""
    from octavo.engine.tokenizer import open_tokenizer

    return open_tokenizer(model.files, getattr(model.checkpoint, "metadata", None), model.spec.vocab_size)


def held_ids(model: OpenedModel, most: int = 512) -> list[int]:
    """Token ids of a text that Octavo carries, for this model; numbers in their place where it has no tokenizer."""
    from octavo.text.held import TEXT

    most = min(most, model.spec.max_positions)
    path = model.files.path
    if model.files.kind == "safetensors" and not (path / "tokenizer.json").exists():
        _log.warning("%s has no tokenizer.json: the KV cache is measured on a row of ids, not on a text.", path)
        return [i * 7919 % model.spec.vocab_size for i in range(most)]
    return tokenizer_of(model).encode(TEXT, parse_special=False)[:most]


def runs_native(config: EngineConfig, spec: ModelSpec, dtype: str) -> bool:
    """Whether the C++ engine runs this model here: on the processor, when it is built and can. Never for float64."""
    from octavo.runner.native import FORMATS, refusal

    wish = config.model.device
    if wish not in ("auto", "cpu") or dtype not in FORMATS:
        return False
    if wish == "auto" and _has_cuda():
        return False
    reason = refusal(spec)
    if reason:
        _log.warning("The native CPU engine is not used: %s. The slower torch path is.", reason)
    return not reason


def _has_cuda() -> bool:
    """Asks for the driver's device first: importing torch takes longer than a small model's whole start."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return False
    import torch

    return torch.cuda.is_available()


def start_engine(
    facts: Facts, vocab_size: int, eos_ids: tuple[int, ...], runner: Runner, *, steady: bool = False
) -> Engine:
    """A scheduler and a loop around a runner. steady: somebody watches the tokens come, so keep their pace even."""
    if runner.swap_blocks < facts.swap_blocks:
        _log.warning("Swapping is not built for this device: sequences that give way compute their KV again.")
    scheduler = Scheduler(
        Limits(
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            max_model_len=facts.max_model_len,
            block_size=facts.block_size,
            blocks=facts.blocks,
            vocab_size=vocab_size,
            prefix_cache=facts.prefix_cache,
            watermark=facts.watermark,
            policy=facts.policy,
            low_first=facts.low_first,
            mixed_prefill=MIXED_PREFILL.get(facts.device, 0) if steady else 0,
            swap_blocks=runner.swap_blocks,
            swap_cost=facts.swap_cost,
        )
    )
    limits = ModelLimits(vocab_size, facts.max_model_len, facts.block_size, eos_ids, facts.prefix_cache)
    caps = QueueCaps(facts.queued_reqs, facts.queued_tokens)
    return Engine(facts, limits, EngineLoop(scheduler, runner, facts.depth, caps))
