"""Where the memory of a CUDA card goes: by the engine's own books, and as the driver's library counts it.

The driver is asked through NVML, which ships with it and needs no package; torch never sees what lies outside its
allocator. `Books` is kept while an engine starts, and `split` adds up what is held at the moment.
"""

from __future__ import annotations

import ctypes

import torch

from octavo.runner.cuda_runner import CudaRunner


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def card_used(device: torch.device) -> int | None:
    """Bytes in use on the card, all processes and the driver included; None where NVML does not answer."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    handle, memory = ctypes.c_void_p(), _Memory()
    answers = (
        nvml.nvmlInit_v2(),
        nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)),
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),
    )
    nvml.nvmlShutdown()
    return None if any(answers) else int(memory.used)


class Books:
    """What the start of an engine takes outside torch's allocator, by cause: bytes in `parts`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.parts: dict[str, int] = {}
        free, total = torch.cuda.mem_get_info(device)  # makes the context
        self._before = total - free - torch.cuda.memory_reserved(device)
        self.parts["driver, CUDA context, other processes"] = self._before

    def note(self, cause: str) -> None:
        """What was taken since the last note has this cause."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        now = total - free - torch.cuda.memory_reserved(self._device)
        self.parts[cause] = self.parts.get(cause, 0) + now - self._before
        self._before = now


def split(runner: CudaRunner) -> dict[str, int]:
    """Bytes on the card by what holds them, by the engine's own books; the runner is one that `build_cuda` made."""
    device, pool = runner.device, runner.pool.data.nbytes
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return {
        **runner.memory,
        "KV cache": pool,
        "buffers of steps, logits, workspaces": allocated - runner.memory["weights"] - pool,
        "kept by torch for graphs and for reuse": reserved - allocated,
    }
