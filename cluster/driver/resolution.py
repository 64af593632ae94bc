"""From what a user set to what a rank is told: files, device, dtype, lengths and the size of the KV pool.

Used by both executors, so that one rank in this process and many across the cluster are sized by the same rules.
Knows settings and the model's numbers; knows nothing of Ray, torch or processes.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.config import ClusterConfig
from cluster.driver.sizing import RankMemory, check_room_on_cpu, pool_size, sequence_limit
from cluster.driver.status import ServedModel
from cluster.errors import InvalidConfig
from model_shards.partition import partition_model
from model_shards.plan import plan_model
from model_shards.sources import resolve_model
from model_shards.spec import ModelSpec
from model_shards.weights.metadata import read_spec
from model_shards.weights.safetensors_index import check_files
from workers.config import ITEM_BYTES, Device, WorkerConfig
from workers.device import default_dtype

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine's disk."""

    path: Path
    spec: ModelSpec

    @classmethod
    def of(cls, name: str, on_progress: Callable[[str], None] = logger.info) -> "ModelFiles":
        """Fetches the model if need be. Raises `model_shards.errors.ModelError`, also for files cut short."""
        path = resolve_model(name, on_progress=on_progress)
        spec = read_spec(path)
        if path.is_dir():  # of a GGUF file, reading the spec has looked at its length
            check_files(path)
        return cls(path, spec)


def resolve_device(device: Literal["auto", "cpu", "cuda"], *, ranks: int, count_gpus: Callable[[], int]) -> Device:
    """Where ranks compute: as it is set; with "auto" on GPUs where there is one for each of `ranks`."""
    if device != "auto":
        return device
    found = count_gpus()
    chosen: Device = "cuda" if found >= ranks else "cpu"
    logger.info("device: %s, for %d ranks and %d GPUs", chosen, ranks, found)
    return chosen


def keeps_spares(config: ClusterConfig, device: Device) -> bool:
    """Whether a spare waits for the seat of a rank that dies: on CPU, unless the user wants none.

    A GPU belongs to an actor from its start, and all ranks of a CUDA group start anew. Raises `InvalidConfig`
    when a spare is asked for there.
    """
    if device == "cuda" and config.spare:
        raise InvalidConfig("spare: on cuda all ranks start anew after a death, so that no spare can help")
    return device == "cpu" and config.spare is not False


def check_model(config: ClusterConfig, spec: ModelSpec) -> None:
    """Whether the model can be served like that, by its numbers alone: before anything is started.

    Raises `InvalidConfig`, `StartupFailed` where a sequence cannot fit into the KV memory that is set, or
    `model_shards.errors.ModelError` when the model cannot be cut so.
    """
    partition_model(spec, config.tensor_parallel_size, config.shard_weights or ())
    wanted = longest_sequence(config, spec)
    if config.kv_cache_memory is not None and config.dtype != "auto":  # else what a token takes is known later
        block_bytes = config.block_size * _kv_bytes_per_token(config, spec, ITEM_BYTES[config.dtype])
        fitting = config.kv_cache_memory // block_bytes
        explicit = config.max_model_len is not None
        sequence_limit(fitting, config.block_size, wanted, explicit=explicit, block_bytes=block_bytes)


def _kv_bytes_per_token(config: ClusterConfig, spec: ModelSpec, item_bytes: int) -> int:
    """Over all ranks."""
    plan = plan_model(
        spec,
        config.tensor_parallel_size,
        item_bytes=item_bytes,
        packed=False,
        shard_weights=config.shard_weights or (),
    )
    return sum(rank.kv_bytes_per_token for rank in plan.ranks)


def longest_sequence(config: ClusterConfig, spec: ModelSpec) -> int:
    """Of tokens, prompt included: as set, or what the model allows. Raises `InvalidConfig` for more than that."""
    wanted = config.max_model_len or spec.max_positions
    if wanted > spec.max_positions:
        raise InvalidConfig(f"max_model_len is {wanted}, but the model has {spec.max_positions} positions")
    return wanted


def worker_config(config: ClusterConfig, files: ModelFiles, device: Device, num_threads: int) -> WorkerConfig:
    """Raises `InvalidConfig` for a sequence longer than the model's positions, or what the device cannot do."""
    _check_device_settings(config, device)
    return WorkerConfig(
        model_path=str(files.path),
        tensor_parallel_size=config.tensor_parallel_size,
        device=device,
        dtype=default_dtype(device) if config.dtype == "auto" else config.dtype,
        block_size=config.block_size,
        max_model_len=longest_sequence(config, files.spec),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        batch_invariant=config.batch_invariant and device == "cpu",
        cuda_graphs=config.cuda_graphs,
        shard_weights=config.shard_weights or (),
        shard_proof=config.shard_proof,
        num_threads=num_threads,
        step_deadline_s=config.step_deadline_s,
        start_deadline_s=config.start_deadline_s,
    )


def _check_device_settings(config: ClusterConfig, device: Device) -> None:
    given = config.model_fields_set
    if device == "cpu":
        for name in ("gpu_memory_share", "cuda_graphs"):
            if name in given:
                raise InvalidConfig(f"{name}: it is for device cuda, and the device is cpu")
        return
    if config.dtype == "float32":
        raise InvalidConfig("dtype: float32 is for device cpu: on cuda FlashAttention wants bfloat16 or float16")
    if config.batch_invariant and "batch_invariant" in given:
        raise InvalidConfig(
            "batch_invariant: it cannot be kept on cuda, where cuBLAS chooses its kernels by the number of rows"
        )
    if config.batch_invariant:
        logger.warning("batch_invariant is off, not on: on cuda a sequence's bits depend on the rows beside it")


def fit(
    config: ClusterConfig, files: ModelFiles, worker: WorkerConfig, ranks: Sequence[RankMemory]
) -> tuple[int, ServedModel]:
    """The number of KV blocks, and the model as it is served with them. Raises `StartupFailed`."""
    most_useful = config.max_num_seqs * -(-worker.max_model_len // worker.block_size)
    num_blocks = pool_size(
        ranks,
        device=worker.device,
        kv_cache_memory=config.kv_cache_memory,
        gpu_memory_share=config.gpu_memory_share,
        most_useful=most_useful,
    )
    if worker.device == "cpu":
        check_room_on_cpu(num_blocks, ranks)
    block_bytes = sum(rank.bytes_per_block for rank in ranks)
    max_model_len = sequence_limit(
        num_blocks,
        worker.block_size,
        worker.max_model_len,
        explicit=config.max_model_len is not None,
        block_bytes=block_bytes,
    )
    if max_model_len < worker.max_model_len:
        logger.warning(
            "max_model_len is %d, not the model's %d: the KV cache holds %d blocks of %d tokens",
            max_model_len,
            worker.max_model_len,
            num_blocks,
            worker.block_size,
        )
    logger.info(
        "KV cache: %d blocks of %d tokens, %.1f MiB over %d ranks",
        num_blocks,
        worker.block_size,
        num_blocks * block_bytes / 2**20,
        len(ranks),
    )
    spec = files.spec
    model = ServedModel(config.model_name, str(files.path), max_model_len, spec.vocab_size, spec.eos_token_ids)
    return num_blocks, model
