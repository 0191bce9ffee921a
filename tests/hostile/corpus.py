"""Broken and hostile model folders and files, each with the words that its refusal must hold.

`good_folder` and `good_gguf` make a tiny sound model; each case changes one thing about it. A case is a name, a
function that makes it below a fresh folder and returns the path to open, and words of the refusal; no words means
that the model opens all the same (and runs nothing that it brings along).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.weights.files import gguf_bytes, gguf_string, gguf_tensor, gguf_value, safetensors_header

VOCAB, HIDDEN, MLP, HEADS, KV = 40, 16, 24, 2, 1
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
    "eos_token_id": 2,
}
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.0.mlp.gate_proj.weight": (MLP, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (MLP, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, MLP),
    "model.norm.weight": (HIDDEN,),
}
GGUF_NAMES = {
    "token_embd.weight": (VOCAB, HIDDEN),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_k.weight": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_v.weight": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (MLP, HIDDEN),
    "blk.0.ffn_up.weight": (MLP, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, MLP),
    "output_norm.weight": (HIDDEN,),
}
WORDS = [chr(ord("a") + i % 26) * (1 + i // 26) for i in range(VOCAB - 3)]
TOKENS = ["<unk>", "<s>", "</s>", *WORDS]
EVIL = "{{ ().__class__.__base__.__subclasses__() }}"


class Case(NamedTuple):
    """One hostile model: how to make it, and words of its refusal (none: it opens)."""

    name: str
    make: Callable[[Path], Path]
    words: tuple[str, ...]


def tokenizer_json() -> dict[str, Any]:
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {t: i for i, t in enumerate(TOKENS)}, "unk_token": "<unk>"},
    }


def header_of(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], bytes]:
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return header, np.random.default_rng(0).normal(0, 0.1, at // 4).astype("<f4").tobytes()


def good_weights() -> bytes:
    return safetensors_header(*header_of(SHAPES))


def good_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    (folder / "model.safetensors").write_bytes(good_weights())
    return folder


def gguf_metadata() -> dict[str, Any]:
    numbers = {
        "embedding_length": HIDDEN,
        "block_count": 1,
        "context_length": 64,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    return {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in numbers.items()} | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.scores": [float(-i) for i in range(VOCAB)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (VOCAB - 3)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip


def gguf_tensors() -> tuple[list[bytes], bytes]:
    table, data = [], b""
    for name, shape in GGUF_NAMES.items():
        table.append(gguf_tensor(name, shape[::-1], 0, len(data)))
        data += np.full(shape, 0.01, "<f4").tobytes()
        data += bytes(-len(data) % 32)
    return table, data


def good_gguf() -> bytes:
    return gguf_bytes(gguf_metadata(), *gguf_tensors())


# How a case is made


def weights(data: bytes) -> Callable[[Path], Path]:
    """A good folder with other bytes for model.safetensors."""

    def make(folder: Path) -> Path:
        (good_folder(folder) / "model.safetensors").write_bytes(data)
        return folder

    return make


def header(change: Callable[[dict[str, Any]], Any], data: bytes | None = None) -> Callable[[Path], Path]:
    """A good folder whose safetensors header is changed in place (or replaced by what `change` returns)."""
    entries, content = header_of(SHAPES)
    other = change(entries)
    return weights(safetensors_header(entries if other is None else other, content if data is None else data))


def text_file(name: str, content: str | bytes | Callable[[], bytes]) -> Callable[[Path], Path]:
    """A good folder with one other file."""

    def make(folder: Path) -> Path:
        data = content() if callable(content) else content
        (good_folder(folder) / name).write_bytes(data.encode() if isinstance(data, str) else data)
        return folder

    return make


def config(**change: Any) -> Callable[[Path], Path]:
    return text_file("config.json", json.dumps(CONFIG | change))


def without(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (good_folder(folder) / name).unlink()
        return folder

    return make


def instead(name: str, put: Callable[[Path], Any]) -> Callable[[Path], Path]:
    """A good folder in which something else lies in the place of a file."""

    def make(folder: Path) -> Path:
        (good_folder(folder) / name).unlink(missing_ok=True)
        put(folder / name)
        return folder

    return make


def gguf(data: bytes, name: str = "model.gguf") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        return folder / name

    return make


def metadata(**change: Any) -> Callable[[Path], Path]:
    """A good GGUF file with other metadata; None drops a key, `__` stands for a dot."""
    values = gguf_metadata()
    for key, value in change.items():
        values[key.replace("__", ".")] = value
    kept = {key: value for key, value in values.items() if value is not None}
    return gguf(gguf_bytes(kept, *gguf_tensors()))


def table(change: Callable[[list[bytes]], Any], **kwargs: Any) -> Callable[[Path], Path]:
    """A good GGUF file with another tensor table."""
    entries, data = gguf_tensors()
    change(entries)
    return gguf(gguf_bytes(gguf_metadata(), entries, data, **kwargs))


def raw_gguf(
    *, magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, entries: int = 0, body: bytes = b""
) -> Any:
    return gguf(magic + struct.pack("<IQQ", version, tensors, entries) + body)


# The cases


def truncations() -> Iterator[Case]:
    """32 cuts of each format: close in the header, spread over the data."""
    for kind, data in (("safetensors", good_weights()), ("gguf", good_gguf())):
        spread = np.linspace(0, len(data) - 1, 25).astype(int).tolist()
        for cut in sorted({*range(1, 9), *spread})[:32]:
            make = weights(data[:cut]) if kind == "safetensors" else gguf(data[:cut])
            yield Case(f"{kind} cut at {cut}", make, (f"model.{kind}",))


def safetensors_cases() -> Iterator[Case]:
    entry = "model.norm.weight"
    file = "model.safetensors"

    def field(name: str, value: Any) -> Callable[[Path], Path]:
        return header(lambda entries: entries[entry].update({name: value}))

    good = good_weights()
    for name, length in (
        ("0", 0),
        ("2^63", 1 << 63),
        ("2^64-1", (1 << 64) - 1),
        ("33 MB", 33 << 20),
        ("file", len(good)),
    ):
        yield Case(f"header length {name}", weights(struct.pack("<Q", length) + good[8:]), (file,))
    yield Case("header not JSON", header(lambda _: "{not json"), (file, "header"))
    yield Case("header a list", header(lambda _: "[1, 2]"), (file, "header"))
    yield Case("header nested", header(lambda _: '{"a":' * 50_000), (file, "header"))
    yield Case("header not UTF-8", header(lambda _: b'{"\xff\xfe": 1}'), (file, "header"))
    yield Case(
        "duplicate key",
        header(lambda e: json.dumps(e)[:-1] + ", " + json.dumps({entry: e[entry]})[1:]),
        (file, "twice"),
    )
    yield Case("overlap", field("data_offsets", [0, 64]), (file, "overlap"))
    yield Case("hole", header(lambda e: None, header_of(SHAPES)[1] + bytes(64)), (file, "describes"))
    yield Case("offsets reversed", field("data_offsets", [64, 0]), (file, entry))
    yield Case("offsets beyond the end", field("data_offsets", [1 << 40, (1 << 40) + 64]), (file, entry))
    yield Case("offsets negative", field("data_offsets", [-64, 0]), (file, entry))
    yield Case("shape and offsets differ", field("shape", [HIDDEN + 1]), (file, entry))
    yield Case("shape negative", field("shape", [-1]), (file, entry))
    yield Case("shape overflows", field("shape", [1 << 32, 1 << 32, 1 << 32]), (file, entry))
    yield Case("shape of 20 dimensions", field("shape", [1] * 20), (file, entry))
    yield Case("shape not numbers", field("shape", ["16"]), (file, entry))
    yield Case("unknown dtype", field("dtype", "F13"), (file, "F13"))
    yield Case("no dtype", header(lambda e: e[entry].pop("dtype") and None), (file, entry))
    yield Case("name of 10,000 letters", header(lambda e: e.update({"x" * 10_000: e.pop(entry)})), (file, "name"))
    yield Case("integers for weights", field("dtype", "I32"), (entry, "I32"))
    yield Case("tensor missing", header(lambda e: e.update({"other": e.pop(entry)})), (entry, "missing"))
    moved = {name: shape[::-1] for name, shape in SHAPES.items()}
    yield Case("tensors transposed", weights(safetensors_header(*header_of(moved))), ("gate_proj.weight", "[16, 24]"))
    yield Case("empty file", weights(b""), (file, "empty"))


def place_cases() -> Iterator[Case]:
    file = "model.safetensors"
    yield Case("fifo", instead(file, os.mkfifo), (file, "regular"))
    yield Case("folder for a file", instead(file, Path.mkdir), (file, "regular"))
    yield Case("link to a system file", instead(file, lambda path: path.symlink_to("/etc/passwd")), (file,))
    yield Case("link to a device", instead(file, lambda path: path.symlink_to("/dev/zero")), (file, "regular"))
    yield Case("link to itself", instead(file, lambda path: path.symlink_to(path.name)), (file,))
    yield Case("dangling link", instead(file, lambda path: path.symlink_to("nowhere")), (file,))
    yield Case("config is a fifo", instead("config.json", os.mkfifo), ("config.json", "regular"))
    yield Case(
        "pickle only", instead(file, lambda path: path.with_name("pytorch_model.bin").write_bytes(b"x")), ("pickle",)
    )
    yield Case("nothing", lambda folder: folder.mkdir() or folder, ("no weights",))
    yield Case("no config", without("config.json"), ("config.json",))
    yield Case("no tokenizer", without("tokenizer.json"), ("tokenizer.json",))

    def shards(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Path]:
        def make(folder: Path) -> Path:
            (good_folder(folder) / file).rename(folder / "a.safetensors")
            index = {"weight_map": dict.fromkeys(SHAPES, "a.safetensors")}
            (folder / "model.safetensors.index.json").write_text(json.dumps(change(index) or index))
            return folder

        return make

    def names(index: dict[str, Any], shard: str) -> None:
        index["weight_map"]["model.norm.weight"] = shard

    yield Case("shard missing", shards(lambda i: names(i, "b.safetensors")), ("b.safetensors",))
    yield Case("shard outside", shards(lambda i: names(i, "../../../etc/passwd")), ("passwd",))
    yield Case("shard absolute", shards(lambda i: names(i, "/etc/a.safetensors")), ("/etc/a.safetensors",))
    yield Case("index without map", shards(lambda i: {"weight_map": []}), ("index.json", "weight_map"))
    yield Case("index names too much", shards(lambda i: i["weight_map"].update(x="a.safetensors")), ("'x'",))


def json_cases() -> Iterator[Case]:
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        yield Case(f"{name} not JSON", text_file(name, "{,}"), (name, "JSON"))
        yield Case(f"{name} a list", text_file(name, "[]"), (name, "list"))
        yield Case(f"{name} nested", text_file(name, "[" * 200_000), (name, "JSON"))
        yield Case(f"{name} of 17 MB", text_file(name, lambda: b" " * (17 << 20)), (name, "limit"))
    yield Case("config not UTF-8", text_file("config.json", b'{"a": "\xff"}'), ("config.json",))
    for key, value in (
        ("architectures", ["os.system"]),
        ("architectures", None),
        ("vocab_size", 1 << 62),
        ("hidden_size", -16),
        ("hidden_size", float("nan")),
        ("num_hidden_layers", 10**12),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("intermediate_size", [24]),
        ("max_position_embeddings", 10**15),
        ("rms_norm_eps", float("inf")),
        ("rope_theta", "1e4"),
        ("rope_scaling", {"rope_type": "__import__('os')"}),
        ("eos_token_id", [[2]]),
        ("dtype", "object"),
        ("quantization_config", {"quant_method": "x"}),
        ("hidden_act", "exec"),
    ):
        yield Case(f"config {key} = {value!r}", config(**{key: value}), ("config.json",))


def tokenizer_cases() -> Iterator[Case]:
    name = "tokenizer.json"
    yield Case("tokenizer not JSON", text_file(name, "{"), (name,))
    yield Case("tokenizer of 50 MB", text_file(name, lambda: b'{"version": "' + b"x" * (50 << 20)), (name,))
    yield Case("tokenizer of 65 MB", text_file(name, lambda: b" " * (65 << 20)), (name, "limit"))
    yield Case("tokenizer nested", text_file(name, '{"model":' * 100_000), (name,))
    yield Case(
        "tokenizer of an unknown kind",
        text_file(name, json.dumps(tokenizer_json() | {"model": {"type": "X"}})),
        (name,),
    )
    odd = tokenizer_json() | {
        "decoder": {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    }
    yield Case("decoder of an unknown kind", text_file(name, json.dumps(odd)), ("CTC",))
    large = tokenizer_json()
    large["model"]["vocab"] |= {f"w{i}": VOCAB + i for i in range(100)}
    yield Case("tokenizer larger than the model", text_file(name, json.dumps(large)), ("140",))
    special = json.dumps({"eos_token": "<nowhere>"})
    yield Case("end token outside the vocabulary", text_file("tokenizer_config.json", special), ("<nowhere>",))
    yield Case(
        "template of 2 MB", text_file("chat_template.jinja", lambda: b"x" * (2 << 20)), ("chat_template.jinja",)
    )
    yield Case("template not UTF-8", text_file("chat_template.jinja", b"\xff"), ("chat_template.jinja", "UTF-8"))
    yield Case(
        "ids beyond generation", text_file("generation_config.json", '{"eos_token_id": 4000}'), ("eos_token_id",)
    )


def gguf_cases() -> Iterator[Case]:
    file = "model.gguf"
    yield Case("magic", raw_gguf(magic=b"GGML"), (file, "GGUF"))
    for version in (0, 1, 4, 0x03000000):
        yield Case(f"version {version}", raw_gguf(version=version), (file, "version 3"))
    yield Case("2^40 tensors", raw_gguf(tensors=1 << 40), (file, "tensors"))
    yield Case("2^63 entries", raw_gguf(entries=1 << 63), (file, "entries"))
    yield Case("key of 2^63 bytes", raw_gguf(entries=1, body=struct.pack("<Q", 1 << 63)), (file, "key"))
    long = gguf_string("k") + struct.pack("<IQ", 8, 1 << 50)
    yield Case("string of 2^50 bytes", raw_gguf(entries=1, body=long), (file, "'k'"))
    array = gguf_string("k") + struct.pack("<IIQ", 9, 4, 1 << 60)
    yield Case("array of 2^60 values", raw_gguf(entries=1, body=array), (file, "'k'"))
    nested = gguf_string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 1000
    yield Case("arrays in arrays", raw_gguf(entries=1, body=nested), (file, "nested"))
    yield Case(
        "value of an unknown type", raw_gguf(entries=1, body=gguf_string("k") + struct.pack("<I", 77)), (file, "77")
    )
    twice = (gguf_string("k") + gguf_value(1)) * 2
    yield Case("key twice", raw_gguf(entries=2, body=twice), (file, "twice"))
    yield Case("tensor twice", table(lambda t: t.append(t[0])), (file, "twice"))
    one = (HIDDEN,)
    yield Case("9 dimensions", table(lambda t: t.append(gguf_tensor("x", (1,) * 9, 0, 0))), (file, "9 dimensions"))
    yield Case("size 0", table(lambda t: t.append(gguf_tensor("x", (0,), 0, 0))), (file, "shape"))
    yield Case(
        "sizes overflow", table(lambda t: t.append(gguf_tensor("x", (1 << 62,) * 4, 0, 0))), (file, "same place")
    )
    yield Case("unknown tensor type", table(lambda t: t.append(gguf_tensor("x", one, 999, 0))), (file, "999"))
    yield Case("type that is not read", table(lambda t: t.append(gguf_tensor("x", (256,), 23, 0))), (file, "IQ4_XS"))
    yield Case("offset not aligned", table(lambda t: t.append(gguf_tensor("x", one, 0, 3))), (file, "multiple"))
    yield Case(
        "offset beyond the end", table(lambda t: t.append(gguf_tensor("x", one, 0, 1 << 50))), (file, "cut off")
    )
    yield Case("tensors in one place", table(lambda t: t.append(gguf_tensor("x", one, 0, 0))), (file, "same place"))
    for alignment in (0, 3, 1 << 31):
        yield Case(f"alignment {alignment}", metadata(general__alignment=alignment), (file, "alignment"))
    for key, value, word in (
        ("general__architecture", "rwkv", "rwkv"),
        ("llama__embedding_length", 0, "embedding_length"),
        ("llama__block_count", 1 << 31, "block_count"),
        ("llama__attention__head_count", None, "head_count"),
        ("llama__attention__head_count_kv", 3, "key/value heads"),
        ("llama__context_length", "many", "context_length"),
        ("llama__rope__freq_base", float("nan"), "freq_base"),
        ("llama__rope__scaling__type", "magic", "magic"),
        ("llama__feed_forward_length", 7, "ffn_gate"),
        ("tokenizer__ggml__model", "pickle", "pickle"),
        ("tokenizer__ggml__tokens", 5, "vocab_size"),
        ("tokenizer__ggml__tokens", ["a"] * VOCAB, "duplicate"),
        ("tokenizer__ggml__scores", [1.0], "scores"),
        ("tokenizer__ggml__token_type", [1], "types"),
        ("tokenizer__ggml__bos_token_id", 4000, "bos"),
        ("tokenizer__ggml__eos_token_id", 4000, "4000"),
        ("split__count", 3, "part"),
    ):
        yield Case(f"{key} = {str(value)[:20]}", metadata(**{key: value}), (file, word))
    yield Case("part alone", gguf(good_gguf(), "m-00001-of-00002.gguf"), ("m-00002-of-00002.gguf",))
    yield Case("tensor table empty", table(lambda t: t.clear()), (file, "missing"))


def inert_cases() -> Iterator[Case]:
    """What opens all the same and must not run."""
    mapped = config(auto_map={"AutoModelForCausalLM": "evil.Model", "AutoTokenizer": "evil.Tok"})

    def with_code(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
        def both(folder: Path) -> Path:
            make(folder)
            (folder / "evil.py").write_text("open(__file__ + '.ran', 'w').close()\n")
            (folder / "setup.py").write_text("open(__file__ + '.ran', 'w').close()\n")
            return folder

        return both

    yield Case("auto_map", with_code(mapped), ())
    yield Case("evil template in a file", text_file("chat_template.jinja", EVIL), ())
    tokenizer = json.dumps({"chat_template": EVIL, "tokenizer_class": "evil.Tok", "eos_token": "</s>"})
    yield Case("evil tokenizer class", with_code(text_file("tokenizer_config.json", tokenizer)), ())
    yield Case("evil template in GGUF", metadata(tokenizer__chat_template=EVIL), ())


def cases() -> list[Case]:
    """All of them."""
    return [
        *truncations(),
        *safetensors_cases(),
        *place_cases(),
        *json_cases(),
        *tokenizer_cases(),
        *gguf_cases(),
        *inert_cases(),
    ]
