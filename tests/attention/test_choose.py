"""Choosing a backend: the fastest that can serve the model; refusals say what is lacking."""

from __future__ import annotations

import pytest
import torch

from octavo.attention.base import AttentionShape
from octavo.attention.choose import choose_backend
from octavo.attention.reference import ReferenceAttention
from octavo.attention.torch_cpu import TorchCpuAttention
from octavo.errors import ConfigError

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, 0.25)


def test_default_on_the_cpu_and_by_name():
    assert isinstance(choose_backend(SHAPE, torch.bfloat16, CPU), TorchCpuAttention)
    assert isinstance(choose_backend(SHAPE, torch.bfloat16, CPU, "reference"), ReferenceAttention)


def test_unknown_name_lists_the_known():
    with pytest.raises(ConfigError, match=r"Unknown attention backend 'flsh'.*torch_cpu.*reference"):
        choose_backend(SHAPE, torch.bfloat16, CPU, "flsh")


def test_named_backend_that_lacks_something():
    with pytest.raises(ConfigError, match="runs on cuda, the model is on cpu"):
        choose_backend(SHAPE, torch.bfloat16, CPU, "triton")
    with pytest.raises(ConfigError, match=r"does not compute in torch\.int8"):
        choose_backend(SHAPE, torch.int8, CPU, "torch_cpu")


def test_a_device_without_a_backend_of_its_own_gets_the_oracle():
    assert isinstance(choose_backend(SHAPE, torch.float32, torch.device("meta")), ReferenceAttention)
