"""What a user set, as a rank is told it: devices against made-up offers of GPUs, and what a device cannot do."""

import logging
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.driver.resolution import ModelFiles, check_model, fit, resolve_device, worker_config
from cluster.driver.sizing import RankMemory
from cluster.errors import InvalidConfig, StartupFailed
from tests.fakes.specs import tiny_spec
from workers.config import Device, WorkerConfig

GIB = 2**30
FILES = ModelFiles(Path("model"), tiny_spec(max_positions=4096))


def no_look() -> int:
    raise AssertionError("nobody has to count GPUs when the device is set")


def resolved(device: Device, **settings: Any) -> WorkerConfig:
    return worker_config(ClusterConfig.parse({"model": "m", **settings}), FILES, device, num_threads=1)


@pytest.mark.parametrize(
    ("gpus", "ranks", "expected"), [(0, 1, "cpu"), (1, 1, "cuda"), (1, 2, "cpu"), (2, 2, "cuda"), (8, 4, "cuda")]
)
def test_auto_takes_gpus_where_there_is_one_for_each_rank(
    gpus: int, ranks: int, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert resolve_device("auto", ranks=ranks, count_gpus=lambda: gpus) == expected
    assert f"device: {expected}, for {ranks} ranks and {gpus} GPUs" in caplog.text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_device_that_is_set_is_kept(device: Device) -> None:
    # A cluster may grow: whether it has the GPUs is for the placement to find out, with a deadline.
    assert resolve_device(device, ranks=2, count_gpus=no_look) == device


def test_cuda_computes_in_bfloat16_and_promises_no_equal_bits(caplog: pytest.LogCaptureFixture) -> None:
    worker = resolved("cuda")
    assert (worker.dtype, worker.batch_invariant, worker.cuda_graphs) == ("bfloat16", False, True)
    assert "batch_invariant is off, not on" in caplog.text
    assert resolved("cpu").batch_invariant
    assert not resolved("cuda", cuda_graphs=False).cuda_graphs
    assert not resolved("cuda", batch_invariant=False).batch_invariant


@pytest.mark.parametrize(
    ("device", "settings", "words"),
    [
        ("cuda", {"dtype": "float32"}, "dtype: float32 is for device cpu"),
        ("cuda", {"batch_invariant": True}, "batch_invariant: it cannot be kept on cuda"),
        ("cpu", {"gpu_memory_share": 0.5}, "gpu_memory_share: it is for device cuda, and the device is cpu"),
        ("cpu", {"cuda_graphs": True}, "cuda_graphs: it is for device cuda, and the device is cpu"),
    ],
)
def test_a_setting_that_the_device_cannot_honour_is_refused(
    device: Device, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidConfig, match=words):
        resolved(device, **settings)


def test_a_sequence_may_not_be_longer_than_the_models_positions() -> None:
    with pytest.raises(InvalidConfig, match="max_model_len is 5000, but the model has 4096 positions"):
        resolved("cpu", max_model_len=5000)


def test_the_kv_cache_of_gpus_is_what_their_share_leaves() -> None:
    ranks = [
        RankMemory("a", 70 * GIB, 2**20, total_bytes=80 * GIB, activation_bytes=2 * GIB),
        RankMemory("a", 60 * GIB, 2**20, total_bytes=80 * GIB, activation_bytes=2 * GIB),
    ]
    config = ClusterConfig.parse({"model": "m", "gpu_memory_share": 0.75, "max_num_seqs": 512})
    num_blocks, model = fit(config, FILES, resolved("cuda", max_num_seqs=512), ranks)
    assert num_blocks == (60 - 20 - 2) * 1024
    assert model.max_model_len == 4096


def test_kv_memory_that_holds_no_sequence_is_refused_by_numbers_alone() -> None:
    spec = FILES.spec
    needed = 1024 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
    settings = {"model": "m", "dtype": "float32", "max_model_len": 1024}
    check_model(ClusterConfig.parse({**settings, "kv_cache_memory": needed}), spec)
    too_little = ClusterConfig.parse({**settings, "kv_cache_memory": needed - 1})
    with pytest.raises(
        StartupFailed, match=rf"one sequence of max_model_len 1024 tokens needs 64 .* = {needed} bytes"
    ):
        check_model(too_little, spec)
    check_model(too_little.model_copy(update={"max_model_len": None}), spec)  # then a sequence may be shorter
    check_model(too_little.model_copy(update={"dtype": "auto"}), spec)  # what a token takes is known later
