"""Which tensors a model wants: the request side of the load plan. Pure values, no reading."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One checkpoint tensor: its name there and the shape it must have (PyTorch order, rows first)."""

    name: str
    shape: tuple[int, ...]
    rope_heads: int = 0
    """0: take the rows as they lie. n > 0: the rows are n heads whose rotary pairs are interleaved
    (GGUF, arch llama): within each head, row 2i + j moves to row j * (rows per head / 2) + i, which is the
    half-split order that the rotary code works in."""
    rows: tuple[int, int] | None = None
    """start and end of the rows to take (tensor parallel); whole heads when `rope_heads` is set"""
    columns: tuple[int, int] | None = None
    """start and end of the elements to take of the last axis; whole blocks of a block type"""


@dataclass(frozen=True)
class TensorNeed:
    """One tensor of the model: internal name, final shape, and the sources joined along dim 0.

    Sources of three dimensions (experts) count as the rows of all their matrices, one after the other.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    offset: float = 0.0
    """added to every element, in float32"""
    wide: bool = False
    """keep float32, even when the model runs in a narrower type"""
