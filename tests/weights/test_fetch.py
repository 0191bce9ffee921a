"""From a model's name to its files. The hub is a stand-in; nothing touches the network."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import ConfigError, ModelError
from octavo.files import read_json
from octavo.weights.fetch import open_checkpoint, resolve_model
from tests.weights.files import gguf_bytes, write_safetensors


def model_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    write_safetensors(folder / "model.safetensors", {"a": np.zeros(2, np.float32)})
    return folder


def test_folder(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    files = resolve_model(str(folder))
    assert (files.kind, files.path) == ("safetensors", folder)
    assert open_checkpoint(files).names() == ["a"]


def test_gguf_file_and_folder_of_one(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({}, [], b""))
    assert resolve_model(path).path == resolve_model(tmp_path).path == path
    assert open_checkpoint(resolve_model(path)).names() == []
    (tmp_path / "n.gguf").touch()
    with pytest.raises(ModelError, match="2 .gguf files"):
        resolve_model(tmp_path)


def test_pickle_only_is_refused_and_never_opened(tmp_path: Path) -> None:
    """Case B-75."""
    marker = tmp_path / "marker"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'touch {marker}'\ntR.".encode())
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    with pytest.raises(ModelError, match="pytorch_model.bin.*pickle"):
        resolve_model(tmp_path)
    assert not marker.exists() and not any(name.endswith(".bin") for name in opened)


def test_incomplete_folders_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no weights"):
        resolve_model(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", {"a": np.zeros(2, np.float32)})
    with pytest.raises(ModelError, match="no config.json"):
        resolve_model(tmp_path)
    (tmp_path / "file.txt").touch()
    with pytest.raises(ModelError, match="neither a folder nor"):
        resolve_model(tmp_path / "file.txt")


def test_without_weights_a_config_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(tmp_path, weights=False).path == tmp_path


@pytest.mark.parametrize("name", ["/no/such/folder", "./x", "a/b/c", "../up/x", "x.gguf", "a b", "", "a/..", "-x/y"])
def test_what_is_neither_path_nor_hub_id(name: str) -> None:
    if name:
        with pytest.raises(ModelError, match="does not exist"):
            resolve_model(name)


def test_revision_of_a_local_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision"):
        resolve_model(model_folder(tmp_path / "m"), revision="main")


def test_config_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError, match="regular"):
        read_json(tmp_path / "config.json")
    (tmp_path / "big.json").write_bytes(b" " * 2000)
    with pytest.raises(ModelError, match="2000 bytes, more than the limit of 1000"):
        read_json(tmp_path / "big.json", limit=1000)


def hub(monkeypatch: pytest.MonkeyPatch, download: Callable[..., str]) -> list[dict[str, Any]]:
    """Puts a stand-in in the place of huggingface_hub; returns the calls that it gets."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        return download(repo_id, **options)

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return calls


def test_hub_id_fetches_data_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "snapshot")
    calls = hub(monkeypatch, lambda repo_id, **_: str(folder))
    files = resolve_model("owner/name", revision="abc")
    assert (files.name, files.kind, files.path) == ("owner/name", "safetensors", folder)
    (call,) = calls
    assert (call["repo_id"], call["revision"]) == ("owner/name", "abc")

    def fetched(name: str) -> bool:
        allowed = any(fnmatch.fnmatch(name, pattern) for pattern in call["allow_patterns"])
        return allowed and not any(fnmatch.fnmatch(name, pattern) for pattern in call["ignore_patterns"])

    wanted = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"]
    assert all(fetched(name) for name in [*wanted, "chat_template.jinja"])
    refused = ["pytorch_model.bin", "model.pt", "model.pth", "modeling_x.py", "x.pkl", "consolidated.safetensors"]
    assert not any(fetched(name) for name in [*refused, "original/model.safetensors", "onnx/config.json"])


def test_hub_cache_of_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blobs = model_folder(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    hub(monkeypatch, lambda repo_id, **_: str(snapshot))
    assert open_checkpoint(resolve_model("owner/name")).names() == ["a"]


def test_gguf_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "m.Q4_1.gguf").write_bytes(gguf_bytes({}, [], b""))
    calls = hub(monkeypatch, lambda repo_id, **_: str(tmp_path))
    assert resolve_model("owner/name/m.Q4_1.gguf").path == tmp_path / "m.Q4_1.gguf"
    assert calls[0]["allow_patterns"] == ["m.Q4_1.gguf"]
    resolve_model("owner/name/m-00002-of-00003.gguf")
    assert calls[1]["allow_patterns"] == ["m-*-of-00003.gguf"]


def test_hub_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class RepositoryNotFoundError(Exception):
        pass

    def missing(repo_id: str, **_: Any) -> str:
        raise RepositoryNotFoundError("404 Client Error\nlong\ntext")

    def offline(repo_id: str, **_: Any) -> str:
        raise OSError("Network is unreachable")

    hub(monkeypatch, missing)
    with pytest.raises(ModelError, match=r"owner/name .*404 Client Error\).*spelling"):
        resolve_model("owner/name")
    hub(monkeypatch, offline)
    with pytest.raises(ModelError, match="unreachable.*Without a network.*folder"):
        resolve_model("owner/name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match="pip install huggingface_hub"):
        resolve_model("owner/name")


def test_embedded_model(smollm2_gguf: Path) -> None:
    files = resolve_model(None)
    assert files.kind == "gguf" and files.path == smollm2_gguf


def test_embedded_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"octavo\[demo\]"):
        resolve_model(None)
