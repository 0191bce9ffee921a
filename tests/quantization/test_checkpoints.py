"""Tiny checkpoints of every format, from disk to logits, against plain ones of the matrices that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config import engine_config
from octavo.engine.build import OpenedModel, open_model
from octavo.errors import ConfigError, ModelError
from octavo.kernels.quant import JoinedWeight, QuantWeight
from octavo.runner.build import build_decoder, load_params
from octavo.runner.memory import weight_bytes
from tests.model.driver import Sequences
from tests.quantization import writers
from tests.quantization.writers import Writer, write_pair

CPU = torch.device("cpu")
PROMPTS = [[(7 * i + 3 * j * j + 5) % 97 for j in range(5 + i)] for i in range(20)]


def group(**weights: Any) -> dict[str, Any]:
    base = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    config = {"group_0": {"targets": ["Linear"], "weights": base | weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "any", "config_groups": config, "ignore": ["lm_head"]}


def gptq(
    bits: int = 4, size: int = 32, symmetric: bool = True, order: bool = False, v2: bool = False
) -> tuple[Writer, Any]:
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "desc_act": order}
    config["checkpoint_format"] = "gptq_v2" if v2 else "gptq"
    return writers.gptq(bits, size, symmetric, order, int(not v2)), config


def awq(size: int) -> tuple[Writer, Any]:
    return writers.awq(size), {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
FP8 = {"num_bits": 8, "type": "float", "group_size": None}
CASES: dict[str, tuple[Writer, dict[str, Any]]] = {
    "awq 32": awq(32),
    "awq 64": awq(64),
    "gptq -1": gptq(size=-1),
    "gptq -1 asym": gptq(size=-1, symmetric=False),
    "gptq 32": gptq(),
    "gptq 32 asym": gptq(symmetric=False),
    "gptq 64 asym v2": gptq(size=64, symmetric=False, v2=True),
    "gptq desc_act": gptq(order=True, symmetric=False),
    "gptq desc_act 64 sym": gptq(order=True, size=64),
    "gptq 8": gptq(bits=8),
    "gptq 8 asym": gptq(bits=8, size=64, symmetric=False),
    "packed 32": (writers.compressed(), group()),
    "packed 32 asym": (writers.compressed(symmetric=False), group(symmetric=False)),
    "packed 64 ordered": (writers.compressed(size=64, order=True), group(group_size=64, actorder="group")),
    "packed 8 channel": (writers.compressed(8, -1), group(num_bits=8, strategy="channel", group_size=None)),
    "fp8 tensor": (writers.fp8(), group(**FP8, strategy="tensor")),
    "fp8 tensor static": (writers.fp8(static=True), group(**FP8, strategy="tensor")),
    "fp8 channel": (writers.fp8("channel"), group(**FP8, strategy="channel")),
    "fp8 hf": (writers.fp8(), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8 blocks": (writers.fp8("block", name="weight_scale_inv"), BLOCKS),
}


def opened(path: Path, **options: Any) -> OpenedModel:
    config, _ = engine_config(model=str(path), **options)
    return open_model(config)


def logits(path: Path, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    model = opened(path)
    decoder = build_decoder(model.spec, model.needs, model.checkpoint, dtype, CPU)
    return Sequences(decoder, len(PROMPTS)).prefill(PROMPTS, 7)


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor], most: float = 1e-3) -> None:
    assert max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True)) < most


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    quantised, plain = write_pair(tmp_path, *CASES[name])
    assert_same(logits(quantised), logits(plain))


@pytest.mark.parametrize("name", CASES)
def test_weights_stay_packed_and_are_as_large_as_foretold(name: str, tmp_path: Path) -> None:
    model = opened(write_pair(tmp_path, *CASES[name], changes={"intermediate_size": 512, "hidden_size": 128})[0])
    params = load_params(model.needs, model.checkpoint, torch.bfloat16, CPU)
    held = {key: value for key, value in params.items() if not isinstance(value, torch.Tensor)}
    assert len(held) == 4 * len(model.spec.layers) and all(isinstance(x, QuantWeight) for x in held.values())
    resident = sum(weight.nbytes for weight in held.values())
    names = [source.name for need in model.needs if need.name in held for source in need.sources]
    stored = sum(model.checkpoint.info(name).nbytes for name in names)
    orders = sum(x.order_I.nbytes for x in held.values() if isinstance(x, QuantWeight) and x.order_I is not None)
    assert resident - orders <= stored * 1.03 + 4 * sum(weight.shape[0] for weight in held.values())
    scheme = model.scheme
    assert scheme is not None
    foretold = weight_bytes(model.needs, "bfloat16", scheme=scheme)
    assert foretold == weight_bytes(model.needs, "bfloat16", stored=model.checkpoint)
    assert foretold[scheme.kind] == pytest.approx(resident, rel=0.02)
    assert sum(foretold.values()) == pytest.approx(sum(weight.nbytes for weight in params.values()), rel=0.02)


def test_fp8_scales_are_read_and_differ(tmp_path: Path) -> None:
    for name in ("fp8 tensor static", "fp8 channel", "fp8 blocks"):
        model = opened(write_pair(tmp_path / name, *CASES[name])[0])
        params = load_params(model.needs, model.checkpoint, torch.float32, CPU)
        scales = torch.cat([x.scales_RG.reshape(-1) for x in params.values() if isinstance(x, QuantWeight)])
        assert (scales != 1).all() and len(scales.unique()) > 6
        static = [x.input_scale for x in params.values() if isinstance(x, QuantWeight)]
        assert all((x is not None and 0.03 < float(x) < 0.04) == ("static" in name) for x in static)


def test_blocks_that_cross_the_joined_matrices_stay_apart(tmp_path: Path) -> None:
    """q has 192 rows: the blocks of k do not begin at a multiple of 128 in the joined matrix."""
    changes = {"num_attention_heads": 12, "intermediate_size": 320}
    quantised, plain = write_pair(tmp_path, *CASES["fp8 blocks"], changes)
    assert_same(logits(quantised), logits(plain))
    model = opened(quantised)
    params = load_params(model.needs, model.checkpoint, torch.float32, CPU)
    assert isinstance(params["layers.0.qkv"], JoinedWeight) and isinstance(params["layers.0.down"], QuantWeight)


@pytest.mark.parametrize("skip", [("v_proj",), ("layers.1.", "gate_proj"), ("self_attn",)])
def test_modules_that_are_left_plain(tmp_path: Path, skip: tuple[str, ...]) -> None:
    quantised, plain = write_pair(tmp_path, *CASES["gptq 32 asym"], skip=skip)
    assert_same(logits(quantised), logits(plain))


def test_tied_embeddings(tmp_path: Path) -> None:
    """Without lm_head, with a redundant one, and with one of its own."""
    quantised, _ = write_pair(tmp_path, *CASES["awq 32"])
    tied = logits(quantised)
    tensors = load_file(quantised / "model.safetensors")
    embed = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embed.clone()}, quantised / "model.safetensors")
    assert_same(logits(quantised), tied, 1e-9)
    save_file(tensors | {"lm_head.weight": embed.flip(0).contiguous()}, quantised / "model.safetensors")
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert_same([x.flip(-1) for x in logits(quantised)], tied, 1e-4)


def edit(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors if tensor is None else tensors | {name: tensor}, path / "model.safetensors")


@pytest.mark.parametrize(
    ("case", "piece", "tensor"),
    [
        ("gptq 32", "self_attn.k_proj.qzeros", None),
        ("gptq 32", "self_attn.k_proj.scales", torch.ones(3, 32).half()),
        ("gptq 32", "self_attn.k_proj.qzeros", torch.ones(2, 5, dtype=torch.int32)),
        ("gptq desc_act", "mlp.down_proj.g_idx", None),
        ("gptq desc_act", "mlp.down_proj.g_idx", torch.zeros(128, dtype=torch.int32)),
        ("gptq 32", "mlp.up_proj.qweight", torch.ones(8, 96, dtype=torch.int32)),
        ("awq 32", "mlp.up_proj.qweight", torch.ones(64, 16).half()),
        ("awq 32", "mlp.up_proj.scales", torch.ones(2, 120).half()),
        ("packed 32", "mlp.up_proj.weight_shape", torch.tensor([128, 63])),
        ("packed 32", "mlp.up_proj.weight_scale", torch.ones(128, 3)),
        ("packed 32 asym", "mlp.up_proj.weight_zero_point", None),
        ("fp8 tensor", "self_attn.q_proj.weight_scale", None),
        ("fp8 blocks", "self_attn.q_proj.weight_scale_inv", torch.ones(2, 1)),
        ("fp8 channel", "self_attn.q_proj.weight_scale", torch.ones(63, 1)),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    case: str, piece: str, tensor: torch.Tensor | None, tmp_path: Path
) -> None:
    quantised, _ = write_pair(tmp_path, *CASES[case])
    edit(quantised, f"model.layers.1.{piece}", tensor)
    with pytest.raises(ModelError) as caught:
        logits(quantised)
    assert "layers.1." + piece.rpartition(".")[0] in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "bitsandbytes"},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "gptq", "bits": 4, "group_size": 48},
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down": {"bits": 8}}},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        group(num_bits=2),
        group(type="float", num_bits=4),
        group() | {"sparsity_config": {"format": "sparse-24-bitmask"}},
    ],
)
def test_schemes_that_cannot_be_read_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    quantised, _ = write_pair(tmp_path, *CASES["gptq 32"])
    whole = json.loads((quantised / "config.json").read_text()) | {"quantization_config": config}
    (quantised / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ModelError):
        opened(quantised)


def test_the_option_must_agree_with_the_checkpoint(tmp_path: Path) -> None:
    quantised, plain = write_pair(tmp_path, *CASES["awq 32"])
    for fits in ("awq", "awq_marlin", "int4", None):
        assert opened(quantised, quantization=fits).scheme is not None
    for wish, path in (("fp8", quantised), ("gptq", quantised), ("awq", plain), ("int3", plain)):
        with pytest.raises(ConfigError):
            opened(path, quantization=wish)


@pytest.mark.parametrize(("kind", "most"), [("fp8", 0.25), ("int8", 0.08), ("int4", 1.5)])
def test_plain_weights_are_quantised_while_loading(kind: str, most: float, tmp_path: Path) -> None:
    _, plain = write_pair(tmp_path, *CASES["awq 32"])
    model = opened(plain, quantization=kind)
    params = load_params(model.needs, model.checkpoint, torch.float32, CPU, kind)
    assert all(isinstance(params[f"layers.0.{name}"], QuantWeight) for name in ("qkv", "o", "gate_up", "down"))
    foretold = weight_bytes(model.needs, "float32", stored=model.checkpoint, quantization=kind)
    assert sum(foretold.values()) == sum(weight.nbytes for weight in params.values())
    decoder = build_decoder(model.spec, model.needs, model.checkpoint, torch.float32, CPU, kind)
    got, expected = Sequences(decoder, len(PROMPTS)).prefill(PROMPTS, 7), logits(plain)
    assert 0 < max(float((x - y).abs().mean()) for x, y in zip(got, expected, strict=True)) < most


def test_zeros_of_nought_borrow_from_their_neighbours(tmp_path: Path) -> None:
    """Positive weights have zero 0, which the first version of GPTQ stores as -1 with a borrow."""
    weight = np.abs(np.random.default_rng(0).normal(size=(16, 64))).astype(np.float32)
    pieces, dense = writers.gptq(symmetric=False)(weight)
    from octavo.quantization.formats import gptq as read

    arrays = [pieces[name].numpy() for name in ("qweight", "qzeros", "scales")]
    np.testing.assert_allclose(read(*arrays, None, 4, 1).dequantize(), dense, rtol=1e-6)


@pytest.mark.parametrize("case", ["gptq 32 asym", "gptq desc_act"])
def test_experts(case: str, tmp_path: Path) -> None:
    """Quantised experts: widened on the torch path, packed on the native one."""
    from transformers import Qwen3MoeConfig

    from octavo.runner.native import build_native, refusal
    from tests.model.driver import as_published, make_rival
    from tests.runner.native import log_probabilities

    sizes = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    rival = make_rival(Qwen3MoeConfig(**sizes, max_position_embeddings=256, bos_token_id=1, eos_token_id=2))
    writer, config = CASES[case]
    packed, plain = {}, {}
    for name, tensor in as_published(rival).items():
        module = name.removesuffix(".weight")
        packed[name] = plain[name] = tensor.detach().contiguous()
        if module.endswith(writers.LINEARS):
            pieces, dense = writer(packed.pop(name).numpy())
            packed |= {f"{module}.{piece}": value.contiguous() for piece, value in pieces.items()}
            plain[name] = torch.from_numpy(dense)
    made = json.loads(rival.config.to_json_string(use_diff=False)) | {"architectures": ["Qwen3MoeForCausalLM"]}
    for path, state, extra in (("quantised", packed, {"quantization_config": config}), ("plain", plain, {})):
        (tmp_path / path).mkdir()
        (tmp_path / path / "config.json").write_text(json.dumps(made | extra))
        save_file(state, tmp_path / path / "model.safetensors")
    assert_same(logits(tmp_path / "quantised"), logits(tmp_path / "plain"))
    model = opened(tmp_path / "quantised")
    if refusal(model.spec):
        pytest.skip("the native module is not built")
    found = []
    for path, dtype in (("quantised", "bfloat16"), ("plain", "float32")):
        one = opened(tmp_path / path)
        runner = build_native(
            one.spec, one.needs, one.checkpoint, blocks=9, block_size=16, rows=64, max_len=64, dtype=dtype
        )
        found.append(log_probabilities(runner, PROMPTS[19])[:, :97])
    assert np.abs(found[0] - found[1]).mean() < 0.15
