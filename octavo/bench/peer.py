"""The rival of `octavo bench offline --vs transformers`: the same weights in `transformers`, on the same machine.

Static batches, left-padded, each run to its longest output; requests are sorted by length first, which is the
kindest order for static batching. Only tokens that were asked for count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from octavo.bench.workloads import BenchRequest
from octavo.config import engine_config
from octavo.engine.build import open_model, run_dtype
from octavo.errors import ConfigError
from octavo.kernels.quant import Weight, dense
from octavo.model.families.common import config_of
from octavo.model.spec import ModelSpec, weight_needs
from octavo.runner.build import load_params, torch_dtype

PAD = 0


def load_transformers(model: str | None, dtype: str, load_format: str) -> Any:
    """The model that `LLM(model, dtype=dtype, load_format=load_format)` loads, weights and all, in `transformers`."""
    config, _ = engine_config(model=model, dtype=dtype, load_format=load_format)
    opened = open_model(config)
    kind = torch_dtype(run_dtype(config, opened.spec))
    params = load_params(opened.needs, opened.checkpoint, kind, torch.device("cpu"))
    return as_transformers(opened.spec, params, kind)


def as_transformers(spec: ModelSpec, params: dict[str, Weight], dtype: torch.dtype) -> Any:
    """A `transformers` model with the given weights (internal names), widened. ConfigError: it is not installed."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ConfigError("transformers is not installed.", 'Run: pip install "octavo[test]"') from None
    if spec.architecture not in ("llama", "qwen2", "qwen3") or any(layer.window for layer in spec.layers):
        raise ConfigError(f"{spec.architecture} has no rival here.", "Compare with a Llama, Qwen2 or Qwen3 model.")
    made = AutoConfig.for_model(spec.architecture, **config_of(spec))
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        made, dtype=dtype, attn_implementation="sdpa"
    ).eval()
    state: dict[str, Tensor] = {}
    for need in weight_needs(spec, "hf"):
        rows = torch.split(dense(params[need.name], dtype), [source.shape[0] for source in need.sources])
        state |= {source.name: part for source, part in zip(need.sources, rows, strict=True)}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if set(missing) - ({"lm_head.weight"} if spec.tied_head else set()) or unexpected:
        raise ConfigError(f"transformers wants other tensors: {missing[:3]}, {unexpected[:3]}.")
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def generate_static(model: Any, requests: Sequence[BenchRequest], batch: int) -> tuple[float, list[list[int]]]:
    """Greedy outputs of all requests in static batches; seconds, and the wanted ids in the order given."""
    order = sorted(range(len(requests)), key=lambda i: (requests[i].out, len(requests[i].ids)))
    outputs: list[list[int]] = [[] for _ in requests]
    begin = time.perf_counter()
    for at in tqdm(range(0, len(order), batch), desc="transformers", disable=None):
        group = order[at : at + batch]
        longest = max(len(requests[i].ids) for i in group)
        steps = max(requests[i].out for i in group)
        ids = torch.tensor([[PAD] * (longest - len(requests[i].ids)) + requests[i].ids for i in group])
        mask = torch.tensor([[0] * (longest - len(requests[i].ids)) + [1] * len(requests[i].ids) for i in group])
        done = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            pad_token_id=PAD,
        )
        for row, i in enumerate(group):
            outputs[i] = done[row, longest : longest + requests[i].out].tolist()
    return time.perf_counter() - begin, outputs
