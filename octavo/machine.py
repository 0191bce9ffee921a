"""What this machine has and what of it this process may use: processor, memory, limits of control groups.

Reads files below /proc and /sys only. What cannot be found out is None, never an error. Sizes are bytes.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

# Instruction sets that decide between kernels, by the kernel's name for them.
ISA_FLAGS = {
    "x86_64": ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile"),
    "aarch64": ("asimd", "asimddp", "i8mm", "bf16", "sve"),
}
UNLIMITED = 1 << 60  # a cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True)
class Cpu:
    """The processor as this process may use it. `limit` is the cgroup's number of cores, None without one."""

    model: str | None
    machine: str
    logical: int
    physical: int
    limit: float | None
    flags: dict[str, bool]


@dataclass(frozen=True)
class Memory:
    """Main memory in bytes; `limit` is the cgroup's, None without one."""

    total: int | None
    available: int | None
    limit: int | None


def cpu_info(root: Path = Path("/"), usable: Collection[int] | None = None) -> Cpu:
    """The processor from /proc and /sys under `root`; `usable` = CPU numbers this process may run on."""
    if usable is None:
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    fields: dict[str, str] = {}
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    machine = platform.machine()
    present = set(fields.get("flags", fields.get("Features", "")).split())
    folders = [root / f"sys/devices/system/cpu/cpu{number}/topology" for number in usable]
    cores = {(_read(folder / "physical_package_id"), _read(folder / "core_id")) for folder in folders}
    known = ("", "") not in cores
    return Cpu(
        model=fields.get("model name") or platform.processor() or None,
        machine=machine,
        logical=len(usable),
        physical=len(cores) if known else len(usable),
        limit=cpu_limit(root),
        flags={flag: flag in present for flag in ISA_FLAGS.get(machine, ())},
    )


def memory_info(root: Path = Path("/")) -> Memory:
    """Main memory from /proc/meminfo under `root` and the cgroup's limit on it."""
    sizes = {}
    for line in _read(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        sizes[key] = int(value.split()[0]) * 1024
    return Memory(sizes.get("MemTotal"), sizes.get("MemAvailable"), memory_limit(root))


def cpu_limit(root: Path = Path("/")) -> float | None:
    """The fewest cores that any cgroup around this process allows; None when none sets a limit."""
    limits = []
    for folder in _cgroups(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.strip().isdigit() and int(period) > 0:
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """The fewest bytes that any cgroup around this process allows; None when none sets a limit."""
    limits = []
    for folder in _cgroups(root, "memory"):
        text = (_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")).strip()
        if text.isdigit() and int(text) < UNLIMITED:
            limits.append(int(text))
    return min(limits, default=None)


def usable_cores() -> int:
    """Cores that compute-bound threads of this process should use: physical, allowed, within the cgroup's limit."""
    cpu = cpu_info()
    cores = min(cpu.physical, cpu.logical)
    return max(1, cores if cpu.limit is None else min(cores, int(cpu.limit) or 1))


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: available, and left of every cgroup's limit; 0 when unknown.

    Pages of files that the kernel would drop do not count as used.
    """
    known = [memory_info(root).available]
    for folder in _cgroups(root, "memory"):
        limit = (_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")).strip()
        used = (_read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")).strip()
        if limit.isdigit() and int(limit) < UNLIMITED and used.isdigit():
            droppable = re.search(r"^(?:total_)?inactive_file (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
            known.append(max(0, int(limit) - int(used) + (int(droppable[1]) if droppable else 0)))
    return min((size for size in known if size is not None), default=0)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the cgroups around this process, version 2 and version 1, innermost first."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / ("" if number == "0" else controller)
            inner = Path(path.lstrip("/"))
            yield from (base / folder for folder in (inner, *inner.parents) if ".." not in folder.parts)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
