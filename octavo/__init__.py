"""Octavo: LLM inference with a paged KV cache and continuous batching.

    from octavo import LLM, SamplingParams

Importing the package is cheap: what needs numpy or torch is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.llm import LLM
    from octavo.engine.llm_engine import AsyncEngineArgs, EngineArgs, LLMEngine
    from octavo.types import CompletionOutput, Logprob, RequestOutput, SamplingParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
]

_PLACES = dict.fromkeys(__all__, "octavo.types") | {
    "LLM": "octavo.engine.llm",
    "AsyncLLM": "octavo.engine.async_llm",
    **dict.fromkeys(("LLMEngine", "EngineArgs", "AsyncEngineArgs"), "octavo.engine.llm_engine"),
}


def __getattr__(name: str) -> object:
    if name == "_C":  # of an old guide; an AttributeError would hide the text from `from octavo import _C`
        raise ImportError("octavo has no _C: `octavo doctor` shows the device, its capability and its kernels.")
    if name not in _PLACES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
