"""vLLM's place for `EngineArgs`."""

from __future__ import annotations

from octavo.engine.llm_engine import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
