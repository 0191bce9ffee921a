"""Scales of a KV cache in FP8: measured on a text that the model reads once at start.

The largest key and value of each layer and head become a quarter of what the format can hold: e4m3 keeps its three
bits of precision over 15 powers of two, so headroom costs nothing, and what other texts exceed is not clamped.

Shape letters: L layers, K key/value heads, T tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.attention.base import HostLengths, StepBatch
from octavo.errors import ConfigError, ModelError
from octavo.kernels.quant import FP8_MAX
from octavo.kernels.reference import accumulate_dtype
from octavo.model.decoder import Decoder
from octavo.weights.checkpoint import Checkpoint, to_float32

_log = logging.getLogger(__name__)

MOST_DIVERGENCE = 0.05
"""mean Kullback-Leibler divergence, in nats a token, up to which a cache in FP8 passes the check"""
HEADROOM = 4.0
_BLOCK = 16
_FIX = "Check the download, or leave --kv-cache-dtype at auto."


@dataclass(frozen=True, slots=True)
class KvScales:
    """Where a model's scales come from: its checkpoint where that has them, else one pass over `ids()`."""

    checkpoint: Checkpoint
    ids: Callable[[], list[int]]
    """of a text, asked for only where something is measured on it"""
    check: bool = False
    """compare both kinds of cache on `ids()` and refuse the start where they differ too much"""

    def give(self, decoder: Decoder) -> None:
        """Set `decoder.kv_scales_L2K`. ConfigError when the check fails."""
        scales_L2K = stored_scales(decoder, self.checkpoint)
        if scales_L2K is None:
            ids = self.ids()
            scales_L2K = calibrate(decoder, ids)
            _log.info("KV cache in FP8: scales measured on %d tokens", len(ids))
        plain_TV = logits(decoder, self.ids()) if self.check else None
        decoder.kv_scales_L2K = scales_L2K
        if plain_TV is not None:
            found = compare(plain_TV, logits(decoder, self.ids()))
            _log.warning("KV cache in FP8 against a plain one: %s", found.line())
            if found.divergence > MOST_DIVERGENCE:
                raise ConfigError(
                    f"The FP8 KV cache changes this model too much: {found.line()}; {MOST_DIVERGENCE} is the limit.",
                    "Leave --kv-cache-dtype at auto.",
                )


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far one set of predictions is from another: mean divergence in nats, share of equal best tokens."""

    divergence: float
    same_best: float
    tokens: int

    def line(self) -> str:
        """In words."""
        return (
            f"mean divergence {self.divergence:.5f} nats, the best token is the same for {self.same_best:.1%} "
            f"of {self.tokens} tokens"
        )


def compare(plain_TV: Tensor, other_TV: Tensor) -> Agreement:
    """Predictions of the same tokens, by logits."""
    p_TV, q_TV = (torch.log_softmax(x.to(accumulate_dtype(x.dtype)), -1) for x in (plain_TV, other_TV))
    divergence = (p_TV.exp() * (p_TV - q_TV)).sum(-1).mean()
    same = (plain_TV.argmax(-1) == other_TV.argmax(-1)).double().mean()
    return Agreement(float(divergence), float(same), len(plain_TV))


@torch.inference_mode()
def logits(decoder: Decoder, ids: list[int]) -> Tensor:
    """logits_TV of a text read at once, through the kind of cache that the decoder makes now.

    The text is read in two halves, so that the second reads the first from the cache.
    """
    half = max(len(ids) // 2, 1)
    whole, blocks = whole_sequence(ids, _BLOCK, decoder.device)
    pool = decoder.make_pool(blocks + 1, _BLOCK)
    parts = []
    for start, stop in ((0, half), (half, len(ids))):
        if start < stop:
            parts.append(decoder.forward(_span(whole, start, stop), pool))
    return decoder.logits(torch.cat(parts))


def _span(whole: StepBatch, start: int, stop: int) -> StepBatch:
    device = whole.ids_T.device
    return StepBatch(
        ids_T=whole.ids_T[start:stop],
        positions_T=whole.positions_T[start:stop],
        slots_T=whole.slots_T[start:stop],
        starts_R1=torch.tensor([0, stop - start], dtype=torch.int32, device=device),
        kv_lens_R=torch.tensor([stop], dtype=torch.int32, device=device),
        tables_RM=whole.tables_RM,
        host=HostLengths(np.array([stop - start]), np.array([stop])),
    )


def stored_scales(decoder: Decoder, checkpoint: Checkpoint) -> Tensor | None:
    """scales_L2K of a checkpoint that was made for a KV cache in FP8, one number a layer or one a head; else None.

    ModelError when it has them for some layers only, or they are not positive.
    """
    names, spec = set(checkpoint.names()), decoder.spec
    found = np.zeros((len(spec.layers), 2, spec.kv_heads), np.float32)
    count = 0
    for layer in range(len(spec.layers)):
        stem = f"{spec.tensor_prefix}model.layers.{layer}.self_attn."
        for part, letter in enumerate("kv"):
            known = (f"{stem}{letter}_scale", f"{stem}{letter}_proj.{letter}_scale", f"{stem}attn.{letter}_scale")
            name = next((name for name in known if name in names), "")
            if not name:
                continue
            values = to_float32(checkpoint.read(name), checkpoint.info(name).dtype).reshape(-1)
            if len(values) not in (1, spec.kv_heads) or not (values > 0).all():
                cause = f"{name} holds {len(values)} scales, {(values > 0).sum()} of them positive"
                raise ModelError(f"{cause}; 1 or {spec.kv_heads} (heads) positive ones are needed.", _FIX)
            found[layer, part] = values
            count += 1
    if count not in (0, 2 * len(spec.layers)):
        cause = f"The checkpoint has {count} scales of the KV cache; its {len(spec.layers)} layers need 2 each."
        raise ModelError(cause, _FIX)
    return torch.from_numpy(found).to(decoder.device) if count else None


@torch.inference_mode()
def calibrate(decoder: Decoder, ids: list[int]) -> Tensor:
    """scales_L2K (float32, on the device) from one pass over `ids` with a cache in the model's dtype.

    `decoder.kv_scales_L2K` must still be None.
    """
    batch, blocks = whole_sequence(ids, _BLOCK, decoder.device)
    pool = decoder.make_pool(blocks + 1, _BLOCK)
    decoder.forward(batch, pool)
    largest_L2K = pool.data.abs().amax(dim=(2, 4, 5)).to(torch.float32)
    return largest_L2K.clamp_min(1e-6) * (HEADROOM / FP8_MAX)


def whole_sequence(ids: list[int], block_size: int, device: torch.device) -> tuple[StepBatch, int]:
    """One row that reads all of `ids` in blocks 1, 2, ...; and how many."""
    count = len(ids)
    blocks = -(-count // block_size)
    positions_T = torch.arange(count, device=device)
    return (
        StepBatch(
            ids_T=torch.tensor(ids, device=device),
            positions_T=positions_T,
            slots_T=positions_T + block_size,
            starts_R1=torch.tensor([0, count], dtype=torch.int32, device=device),
            kv_lens_R=torch.tensor([count], dtype=torch.int32, device=device),
            tables_RM=torch.arange(1, blocks + 1, dtype=torch.int32, device=device)[None],
            host=HostLengths(np.array([count]), np.array([count])),
        ),
        blocks,
    )
