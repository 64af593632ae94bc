"""The driver's side of the shard proof: what does not add up is refused by tensor and rank, in a restart too."""

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cluster.config import ClusterConfig
from cluster.driver.local_executor import start_local_group
from cluster.driver.patience import Patience
from cluster.driver.proving import ShardProof
from cluster.errors import StartupFailed
from model_shards.registry import Model
from model_shards.weights import loader
from tests.fakes.checkpoints import write_tiny_model
from tests.fakes.worker_configs import tiny_worker_config
from workers import worker as worker_module
from workers.reports import LoadReport
from workers.worker import Worker

NORM = "layers.1.mlp_norm"
BLAME = "layers.1.mlp_norm.weight is not what 'model.layers.1.post_attention_layernorm.weight' has in rows 0-96"


class ThreadRanks:
    """Two ranks of this process, called as actors are: `actor.method.remote(...)`."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._actors = [
            SimpleNamespace(
                file_sums=SimpleNamespace(remote=worker.file_sums),
                differing=SimpleNamespace(remote=worker.differing),
            )
            for worker in workers
        ]
        self.asked: list[str] = []

    def name_of(self, rank: int) -> str:
        return f"rank {rank} (pid {100 + rank})"

    def call(
        self, what: str, method: Callable[[Any], Any], patience: Patience, which: Collection[int] | None = None
    ) -> list[Any]:
        self.asked.append(what)
        return [method(actor) for actor in self._actors]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path, "llama")


@pytest.fixture
def workers(folder: Path) -> Iterator[list[Worker]]:
    """Two that have joined."""
    config = tiny_worker_config(folder, 2)
    made = [Worker(rank, config) for rank in range(2)]
    address = made[0].open_group(same_host=True)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda worker: worker.join_group(address), made))
    yield made
    for worker in made:
        worker.close()


def tampering(rank: int, monkeypatch: pytest.MonkeyPatch, module: Any = worker_module) -> None:
    """Let `rank` flip a bit of a norm in its memory after it has loaded."""

    def load(path: Path, group: Any, **settings: Any) -> Model:
        model = loader_load(path, group, **settings)
        if group.rank == rank:
            weight = model.get_submodule(NORM).get_parameter("weight")
            assert isinstance(weight, nn.Parameter)
            weight.view(torch.int32)[3] ^= 1
        return model

    monkeypatch.setattr(module, "load_model", load)


loader_load = loader.load_model


def loaded(workers: Sequence[Worker]) -> list[LoadReport]:
    return [worker.load() for worker in workers]


def test_what_adds_up_is_proved_and_a_restarted_rank_proves_its_own_part(workers: list[Worker]) -> None:
    ranks, patience = ThreadRanks(workers), Patience(60.0)
    proof = ShardProof.of_files(ranks, patience)
    proof.check(loaded(workers), ranks, patience)
    proof.check([workers[1].load()], ranks, patience)
    assert ranks.asked == ["read the files again"]


def test_a_fault_at_the_start_is_refused_by_tensor_and_rank(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    tampering(1, monkeypatch)
    ranks, patience = ThreadRanks(workers), Patience(60.0)
    proof = ShardProof.of_files(ranks, patience)
    with pytest.raises(StartupFailed) as refused:
        proof.check(loaded(workers), ranks, patience)
    assert str(refused.value) == (
        f"the weights in memory are not those of the files: rank 1 (pid 101): {BLAME} and columns 0-1"
    )


def test_a_fault_in_a_restart_is_refused(workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, patience = ThreadRanks(workers), Patience(60.0)
    proof = ShardProof.of_files(ranks, patience)
    proof.check(loaded(workers), ranks, patience)
    tampering(0, monkeypatch)
    with pytest.raises(StartupFailed, match=r"rank 0 \(pid 100\): layers\.1\.mlp_norm\.weight"):
        proof.check([workers[0].load()], ranks, patience)
    monkeypatch.undo()
    proof.check([workers[0].load()], ranks, patience)


def test_one_process_proves_itself_and_need_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"model": str(folder), "device": "cpu", "kv_cache_memory": "1MiB", "max_model_len": 32}
    start = partial(start_local_group, ClusterConfig.parse(settings))
    start().executor.stop()
    tampering(0, monkeypatch, loader)
    with pytest.raises(StartupFailed, match=r"not those of the files: this process: layers\.1\.mlp_norm\.weight"):
        start()
    start_local_group(ClusterConfig.parse({**settings, "shard_proof": False})).executor.stop()
