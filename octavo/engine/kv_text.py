"""The picture of `octavo.engine.inspect.kv_state` as lines for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MAX_NAMES = 6  # requests and runs of blocks that one line names


def kv_text(state: Mapping[str, Any]) -> str:
    """How full the cache is, one line for each live sequence (blocks, sharing, waste), and the last preemption."""
    total, used, live, waste = (state[key] for key in ("total_blocks", "used_blocks", "live_tokens", "waste_tokens"))
    size, cached = state["block_size"], len(state["cached"])
    lines = [
        f"{used} of {total} blocks of {size} tokens are held; the prefix index knows what is in {cached}",
        f"they hold {live} tokens and {waste} empty places ({100 * waste / max(live + waste, 1):.1f} %)",
    ]
    if state["host_blocks"]:
        held = state["host_blocks"] - state["free_host_blocks"]
        lines.append(f"{held} of {state['host_blocks']} host blocks are held")
    tables = state["tables"]
    holders: dict[int, list[str]] = {}
    for table in tables:
        for block in table["blocks"]:
            holders.setdefault(block, []).append(_name(table))
    for table in tables:
        lines.append(_line(table, holders, size))
    last = state["last_preemption"]
    if last is None:
        lines.append("nobody had to give way so far")
    else:
        lines.append(
            f"last preemption, step {last['step']}: {last['request_id']}.{last['child']} gave way with "
            f"{last['tokens']} computed tokens to request {last['to_request']}: {last['why']}"
        )
    return "\n".join(lines) + "\n"


def _name(table: Mapping[str, Any]) -> str:
    return f"{table['request']}.{table['child']}"


def _line(table: Mapping[str, Any], holders: Mapping[int, list[str]], size: int) -> str:
    """One sequence: `request.child`, state, tokens, blocks, who shares them, empty places."""
    blocks, own = table["blocks"], _name(table)
    parts = [f"{own}: {table['state']}, {table['computed']} of {table['tokens']} tokens computed"]
    if blocks:
        parts.append(f"blocks {_runs(blocks)}")
        shared = [block for block in blocks if len(holders[block]) > 1]
        others = dict.fromkeys(name for block in shared for name in holders[block] if name != own)
        if shared:
            parts.append(f"shares {len(shared)} with {_some(others)}")
        parts.append(f"{max(len(blocks) * size - table['tokens'], 0)} places empty")
    if table["host_blocks"]:
        parts.append(f"{len(table['host_blocks'])} blocks on the host")
    if table["cached_tokens"]:
        parts.append(f"{table['cached_tokens']} tokens were cached")
    if table["preemptions"]:
        parts.append(
            f"gave way {table['preemptions']} times ({table['recomputed_tokens']} tokens computed again, "
            f"{table['swapped_tokens']} brought back)"
        )
    return "; ".join(parts)


def _runs(blocks: Iterable[int]) -> str:
    """Block numbers in order, with runs as first-last."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and runs[-1][1] + 1 == block:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    return _some([str(first) if first == last else f"{first}-{last}" for first, last in runs])


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
