"""`octavo quantize`: a 4-bit checkpoint from a model and a calibration text.

What it writes is a folder in the layout of AWQ or GPTQ that other engines read too: config.json with a
`quantization_config`, model.safetensors, and the tokenizer. Embedding, head and norms stay as they are.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.calibration import pieces
from octavo.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.engine.build import OpenedModel
    from octavo.kernels.quant import Weight
    from octavo.quantization.solve import Rounded
    from octavo.text.tokenizer import Tokenizer
    from octavo.weights.write import Stored

_COPIED = ("*.json", "*.model", "*.jinja", "*.txt")
_NOT_COPIED = ("config.json", "model.safetensors.index.json")
_REWRITTEN = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_ROPES = ("default", "linear", "llama3")
TOKENS = 16384
"""calibration tokens, some for each input of the widest matrix of a small model"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="folder, .gguf file or hub id of a model that is not quantised yet")
    parser.add_argument("output", type=Path, help="folder to write; must not exist or be empty")
    parser.add_argument("--method", default="awq", help="awq, gptq, or rtn (round to nearest, no calibration)")
    parser.add_argument("--group-size", type=int, default=128, help="inputs that share a scale: 32, 64 or 128")
    parser.add_argument("--calibration", type=Path, help="UTF-8 text like the model's; else a mixed one of Octavo's")
    parser.add_argument("--calibration-tokens", type=int, default=TOKENS, help="tokens of it that are used")
    parser.add_argument("--context", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())):
        raise ConfigError(f"{args.output} exists already.", "Name a new folder.")
    size = quantise_folder(
        args.model, args.output, args.method, args.group_size, args.calibration, args.calibration_tokens,
        args.context, args.revision, args.device,
    )  # fmt: skip
    print(f"{args.output}: {size / 1e6:.1f} MB, {args.method}, groups of {args.group_size}")
    return 0


def quantise_folder(
    model: str | None,
    output: Path,
    method: str,
    group: int,
    calibration: Path | None = None,
    tokens: int = TOKENS,
    context: int = 512,
    revision: str | None = None,
    device: str = "auto",
) -> int:
    """Write the checkpoint; returns its bytes. Raises ConfigError, ModelError. Shows progress on a terminal."""
    import torch
    from tqdm import tqdm

    from octavo.engine.build import tokenizer_of
    from octavo.runner.build import load_params, pick_device
    from octavo.runner.calibrated import quantise

    for name, value, least in (("context", context, 2), ("calibration-tokens", tokens, 1)):
        if value < least:
            raise ConfigError(f"{name} is {value}.", f"Give --{name} of {least} or more.")
    opened = open_plain(model, method, group, revision)
    tokenizer = tokenizer_of(opened)
    context = min(context, opened.spec.max_positions)
    texts = [] if method == "rtn" else pieces(tokenizer, calibration, tokens, context)
    params = load_params(opened.needs, opened.checkpoint, torch.float32, pick_device(device))

    def progress(layers: Iterable[int]) -> Iterable[int]:
        bar: Iterable[int] = tqdm(layers, desc=f"Quantising ({method})", unit="layer", disable=None)
        return bar

    rounded = quantise(opened.spec, params, texts, method, group, progress)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=output.name, dir=output.parent) as folder:
        made = Path(folder) / output.name
        made.mkdir()
        size = _write(made, opened, tokenizer, params, rounded, method, group)
        made.replace(output)
    return size


def open_plain(model: str | None, method: str, group: int, revision: str | None = None) -> OpenedModel:
    """The model, if it can be quantised so and written; nothing of it is read yet. Raises ConfigError, ModelError."""
    from octavo.config import engine_config
    from octavo.engine.build import open_model
    from octavo.model.spec import weight_needs
    from octavo.runner.calibrated import check
    from octavo.runner.memory import LAYER_PRODUCTS

    config, _ = engine_config(model=model, revision=revision)
    opened = open_model(config)
    if opened.scheme is not None:
        cause = f"The model is quantised already ({opened.scheme.line()})."
        raise ModelError(cause, "Give the one that it was made from.")
    spec = opened.spec
    check(spec, method, group)
    if opened.files.kind == "gguf" and spec.architecture not in _REWRITTEN:
        raise ModelError(f"A {spec.architecture} model in GGUF cannot be rewritten.", "Give its safetensors files.")
    if opened.files.kind == "gguf" and spec.rope.kind not in _ROPES:
        cause = f"The positions of the model in GGUF are of the kind {spec.rope.kind!r}, which cannot be rewritten."
        raise ModelError(cause, "Give its safetensors files.")
    for need in weight_needs(spec, "hf"):
        for source in need.sources if need.name.rpartition(".")[2] in LAYER_PRODUCTS else ():
            if source.shape[0] % 8:
                cause = f"{source.name} has {source.shape[0]} outputs; AWQ and GPTQ need a multiple of 8."
                raise ModelError(cause, "Give --quantization int4 when the model is run.")
    return opened


def _write(
    output: Path,
    opened: OpenedModel,
    tokenizer: Tokenizer,
    params: Mapping[str, Weight],
    rounded: Mapping[str, Rounded],
    method: str,
    group: int,
) -> int:
    import shutil

    from octavo.files import read_json
    from octavo.model.families.common import config_of
    from octavo.quantization.export import awq_config, gptq_config
    from octavo.weights.write import write_safetensors

    spec = opened.spec
    if opened.files.kind == "gguf":
        found: dict[str, Any] = config_of(spec) | {"model_type": spec.architecture}
        found |= {"architectures": [_REWRITTEN[spec.architecture]], "torch_dtype": _dtype(opened)}
        found |= {"hidden_act": "silu", "bos_token_id": spec.bos_id, "eos_token_id": list(opened.eos_ids)}
        tokenizer.save(output)
    else:
        folder = opened.files.path
        found = read_json(folder / "config.json")
        for path in (path for pattern in _COPIED for path in folder.glob(pattern) if path.name not in _NOT_COPIED):
            shutil.copyfile(path, output / path.name)
    found["quantization_config"] = awq_config(group) if method == "awq" else gptq_config(group)
    (output / "config.json").write_text(json.dumps(found, indent=2) + "\n")
    return write_safetensors(output / "model.safetensors", dict(_tensors(opened, params, rounded, method)))


def _tensors(
    opened: OpenedModel, params: Mapping[str, Weight], rounded: Mapping[str, Rounded], method: str
) -> Iterable[tuple[str, Stored]]:
    """Every tensor of the checkpoint under its published name."""
    import torch

    from octavo.kernels.quant import dense
    from octavo.model.spec import weight_needs
    from octavo.quantization.export import to_awq, to_gptq
    from octavo.weights.write import TAGS

    spec = opened.spec
    for need in weight_needs(spec, "hf"):
        row = 0
        for source in need.sources:
            rows = slice(row, row + source.shape[0])
            row += source.shape[0]
            if need.name not in rounded:
                plain = dense(params[need.name], torch.float32)[rows]
                yield source.name, _stored(plain - need.offset, _dtype(opened))
                continue
            whole = rounded[need.name]
            codes, scales, zeros = (x[rows].cpu().numpy() for x in (whole.codes, whole.scales_OG, whole.zeros_OG))
            if method == "awq":
                made = to_awq(codes, scales, zeros)
            else:
                made = to_gptq(codes, scales, zeros, whole.group)
            for piece, array in made.items():
                yield f"{source.name.removesuffix('weight')}{piece}", (array, TAGS[str(array.dtype)])


def _dtype(opened: OpenedModel) -> str:
    """The type of what stays plain: the model's own; bfloat16 for a GGUF file, whose matrices had fewer bits."""
    return "bfloat16" if opened.files.kind == "gguf" else opened.spec.dtype


def _stored(tensor: Tensor, dtype: str) -> Stored:
    import torch

    tensor = tensor.cpu().contiguous()
    if dtype == "bfloat16":
        return tensor.to(torch.bfloat16).view(torch.uint16).numpy(), "BF16"
    if dtype == "float16":
        return tensor.to(torch.float16).numpy(), "F16"
    return tensor.numpy(), "F32"
