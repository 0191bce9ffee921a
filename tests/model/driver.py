"""Drives a decoder by hand: chunks of several sequences a step, KV in shuffled blocks. Logits of every token.

Also the rivals: a `transformers` model made from a config with seeded weights, saved as a model folder, and the
decoder that Octavo loads from it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.attention.base import HostLengths, StepBatch
from octavo.config import engine_config
from octavo.engine.build import OpenedModel, open_model
from octavo.model.decoder import Decoder
from octavo.runner.build import build_decoder

CPU = torch.device("cpu")


class Sequences:
    """`count` sequences of up to `max_len` tokens in one KV pool; their blocks lie in a shuffled order."""

    def __init__(
        self, decoder: Decoder, count: int, *, block_size: int = 16, max_len: int = 128, seed: int = 0
    ) -> None:
        self._decoder, self._block_size = decoder, block_size
        columns = -(-max_len // block_size)
        blocks = list(range(1, count * columns + 1))
        random.Random(seed).shuffle(blocks)
        self._pool = decoder.make_pool(len(blocks) + 1, block_size)
        self._tables = np.array(blocks).reshape(count, columns)
        self.lengths = [0] * count

    @torch.inference_mode()
    def feed(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """One step: the next tokens of some sequences; logits_TV of each of them."""
        rows = list(chunks)
        query = np.array([len(chunks[row]) for row in rows])
        start = np.array([self.lengths[row] for row in rows])
        position = np.concatenate([np.arange(s, s + n) for s, n in zip(start, query, strict=True)])
        tables = self._tables[rows]
        row_of = np.repeat(np.arange(len(rows)), query)
        slots = tables[row_of, position // self._block_size] * self._block_size + position % self._block_size
        batch = StepBatch(
            ids_T=torch.tensor([token for row in rows for token in chunks[row]]),
            positions_T=torch.from_numpy(position),
            slots_T=torch.from_numpy(slots),
            starts_R1=torch.from_numpy(np.concatenate(([0], np.cumsum(query)))).to(torch.int32),
            kv_lens_R=torch.from_numpy(start + query).to(torch.int32),
            tables_RM=torch.from_numpy(tables).to(torch.int32),
            host=HostLengths(query, start + query),
        )
        logits_TV = self._decoder.logits(self._decoder.forward(batch, self._pool))
        for row, count in zip(rows, query, strict=True):
            self.lengths[row] += int(count)
        return dict(zip(rows, torch.split(logits_TV, query.tolist()), strict=True))

    def prefill(self, prompts: Sequence[Sequence[int]], chunk: int) -> list[Tensor]:
        """All prompts together, `chunk` tokens of each a step; logits_TV of each prompt."""
        parts: list[list[Tensor]] = [[] for _ in prompts]
        for at in range(0, max(map(len, prompts)), chunk):
            chunks = {row: ids[at : at + chunk] for row, ids in enumerate(prompts) if at < len(ids)}
            for row, logits in self.feed(chunks).items():
                parts[row].append(logits)
        return [torch.cat(part) for part in parts]

    def greedy(self, first: Sequence[int], steps: int) -> tuple[list[list[int]], list[Tensor]]:
        """`steps` greedy tokens after the given ones, all sequences together; ids and logits_TV of each."""
        ids: list[list[int]] = [[token] for token in first]
        logits: list[list[Tensor]] = [[] for _ in first]
        for _ in range(steps):
            out = self.feed({row: [tokens[-1]] for row, tokens in enumerate(ids)})
            for row, logits_1V in out.items():
                ids[row].append(int(logits_1V[0].argmax()))
                logits[row].append(logits_1V)
        return ids, [torch.cat(part) for part in logits]


def make_rival(config: Any, seed: int = 0) -> Any:
    """A `transformers` model with weights large enough that a wrong layer shows: every tensor seeded, none zero."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                tensor.copy_(1 + 0.2 * noise if tensor.mean() > 0.5 else 0.2 * noise)
            else:
                tensor.copy_(noise * (0.3 if tensor.dim() == 1 else 1.2 * tensor.shape[-1] ** -0.5))
    return model


def save_folder(model: Any, folder: Path, shards: int = 1) -> Path:
    """The model as config.json and safetensors files, written with the safetensors library."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config))
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = {name: tensor.contiguous() for name, tensor in as_published(model).items() if name not in tied}
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    places = {name: names[i % shards] for i, name in enumerate(state)}
    for file in names:
        save_file({name: tensor for name, tensor in state.items() if places[name] == file}, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def as_published(model: Any) -> dict[str, Tensor]:
    """The tensors as checkpoints have them: each expert apart, where transformers keeps them together."""
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            state[name] = tensor
            continue
        prefix = name.rpartition(".")[0]
        for expert, part in enumerate(tensor):
            if name.endswith("down_proj"):
                state[f"{prefix}.{expert}.down_proj.weight"] = part
            else:
                gate, up = part.chunk(2)
                state |= {f"{prefix}.{expert}.gate_proj.weight": gate, f"{prefix}.{expert}.up_proj.weight": up}
    return state


def opened(folder: Path, **options: Any) -> OpenedModel:
    """What `LLM` opens for this folder."""
    return open_model(engine_config(model=str(folder), **options)[0])


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder that `LLM` builds for this folder."""
    model = opened(folder)
    return build_decoder(model.spec, model.needs, model.checkpoint, dtype, CPU)


def random_prompts(vocab: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """One prompt of random ids for each length."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def rival_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """logits_TV of one sequence, computed at once without a cache."""
    logits: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def assert_equal_to_rival(
    rival: Any,
    decoder: Decoder,
    *,
    lengths: Sequence[int] = (1, 7, 16, 40),
    chunk: int = 64,
    block_size: int = 16,
    steps: int = 10,
    max_len: int = 128,
    within: float = 1e-4,
) -> None:
    """Chunked prefill of all prompts together, then greedy decoding: logits of every position, and every id."""
    prompts = random_prompts(rival.config.vocab_size, lengths)
    sequences = Sequences(decoder, len(prompts), block_size=block_size, max_len=max_len)
    prefill = sequences.prefill(prompts, chunk)
    ids, decoded = sequences.greedy([int(logits[-1].argmax()) for logits in prefill], steps)
    for prompt, first, new, rest in zip(prompts, prefill, ids, decoded, strict=True):
        expected = rival_logits(rival, prompt + new[:-1])
        got = torch.cat((first, rest))
        worst = (got - expected).abs().max()
        assert worst < within, (len(prompt), float(worst))
        assert expected[len(prompt) - 1 :].argmax(-1).tolist() == new
