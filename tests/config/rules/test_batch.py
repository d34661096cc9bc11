"""By how much the GPUs are divided before the batch is counted."""

from __future__ import annotations

import pytest

from dsrun.config.rules.running import batch


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({}, 1),
        ({"sequence_parallel_size": 4}, 4),
        ({"sequence_parallel_size": 2}, 2),
        ({"sequence_parallel_size": 0}, 1),
        ({"sequence_parallel_size": True}, 1),
        ({"sequence_parallel_size": "2"}, 1),
        ({"tensor_parallel": {"autotp_size": 2}}, 1),
    ],
)
def test_model_parallel_size(config, size):
    assert batch.model_parallel_size(config) == size
