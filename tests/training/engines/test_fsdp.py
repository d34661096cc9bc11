"""What of FSDP's engine needs no other ranks."""

from __future__ import annotations

import pytest
from needed import needs

needs("torch")


def test_the_norm_of_large_gradients_is_right():
    """In fp32 it would be 2e-3 off."""
    import torch

    from dsrun.training.engines.fsdp import whole_norm

    gradients = [torch.full((1 << 22,), 0.1), torch.full((2, 3), 2.0)]
    wanted = (sum(float(one.double().square().sum()) for one in gradients)) ** 0.5
    norm = whole_norm(gradients)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(wanted, rel=1e-6)
