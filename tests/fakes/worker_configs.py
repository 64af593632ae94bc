"""The settings of ranks for tests: small enough for the tiny models."""

from pathlib import Path
from typing import Any

from workers.config import WorkerConfig


def tiny_worker_config(model: Path | str = "", ranks: int = 1, **changes: Any) -> WorkerConfig:
    """On a CPU, in float32; `changes` are fields of `WorkerConfig`."""
    fields: dict[str, Any] = {
        "model_path": str(model),
        "tensor_parallel_size": ranks,
        "device": "cpu",
        "dtype": "float32",
        "block_size": 4,
        "max_model_len": 32,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }
    return WorkerConfig(**fields | changes)
