"""What loading costs, with the shard proof and without: seconds and peak memory of each rank.

    python -m benchmarks.loading [MODEL] [--tp 1,2] [--dtype float32] [--repeat 3]

Without MODEL, a random Llama of 1 GB in bfloat16 is written to a temporary folder first. Each rank is a new
process with its share of the cores; its files are in the page cache. `load` fills the shard, `held` sums what is
in memory, `files` reads the rank's share of the files again; `proof` is both as a share of `load`. Medians.

Peak memory is what the process itself allocates (RssAnon, sampled every few milliseconds) above what it had before
loading; pages of the mapped files come and go with the page cache and are left out. It should stay under the shard
and one tensor, the largest parameter: `over` is what it takes beyond the shard, in parts of that.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import save_file

from model_shards.layers.linear import Linear
from model_shards.sources import resolve_model
from model_shards.weights.file_sums import file_sums
from model_shards.weights.holdings import holdings_of
from model_shards.weights.loader import load_model
from model_shards.weights.proof import Checksum, Holding, add_up, unproved
from workers.device import set_threads, threads_per_rank, torch_dtype

DEADLINE_S = 600.0
SAMPLE_S = 0.003
MIB = 2**20

# 483 million weights: 0.97 GB in bfloat16.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """One rank, one time."""

    load_s: float
    held_s: float
    files_s: float
    peak_load: int  # bytes above what the process had before
    peak_proof: int  # the same, after loading
    shard: int  # bytes of memory that hold weights
    largest: int  # bytes of the largest parameter


class Rank:
    """A place in a group without the others: loading needs no collective."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def measure(rank: int, size: int, path: Path, dtype: str, connection: Connection) -> None:
    set_threads(threads_per_rank(size))
    kind = torch_dtype(dtype)  # type: ignore[arg-type]
    started = own_memory()
    with peak_memory() as loading:
        since = time.perf_counter()
        model = load_model(path, Rank(rank, size), device=torch.device("cpu"), dtype=kind)
        load_s = time.perf_counter() - since
    with peak_memory() as proving:
        since = time.perf_counter()
        holdings = holdings_of(model, path, rank)
        held_s = time.perf_counter() - since
        since = time.perf_counter()
        sums = file_sums(path, kind, share=rank, num_shares=size)
        files_s = time.perf_counter() - since
    packed = [
        each.dense_weight().nbytes for each in model.modules() if isinstance(each, Linear) and each.weight is None
    ]
    plain = {each.data_ptr(): each.nbytes for each in model.parameters()}
    largest = max(layout.local_size(rank) for layout in model.layout.values()) * kind.itemsize
    figures = Figures(
        load_s,
        held_s,
        files_s,
        loading[0] - started,
        proving[0] - started,
        sum(packed) + sum(plain.values()),
        largest,
    )
    connection.send((figures, holdings, sums))


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """The first element of the list becomes the most that this process had while the block ran."""
    peak = [own_memory()]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_S):
            peak[0] = max(peak[0], own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()
        peak[0] = max(peak[0], own_memory())


def own_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status does not say RssAnon")


def run(path: Path, size: int, dtype: str) -> list[Figures]:
    """All ranks at once, each in a process. Fails when the proof does."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=measure, args=(rank, size, path, dtype, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    found: list[tuple[Figures, tuple[Holding, ...], dict[str, Checksum]]] = []
    for ours, _ in pipes:
        if not ours.poll(DEADLINE_S):
            raise TimeoutError(f"a rank said nothing for {DEADLINE_S:g} s")
        found.append(ours.recv())
    for process in processes:
        process.join(DEADLINE_S)
    wrong = unproved([holdings for _, holdings, _ in found], add_up(sums for _, _, sums in found))
    if wrong:
        raise ValueError(f"not proved: {wrong}")
    return [figures for figures, _, _ in found]


def write_random_model(folder: Path) -> Path:
    """A Llama of `CONFIG` with random weights, one safetensors file."""
    hidden, ffn, vocab = (int(str(CONFIG[key])) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = hidden * int(str(CONFIG["num_key_value_heads"])) // int(str(CONFIG["num_attention_heads"]))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for index in range(int(str(CONFIG["num_hidden_layers"]))):
        layer = f"model.layers.{index}"
        shapes |= {f"{layer}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (kv, hidden) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, ffn)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.empty(shape).uniform_(-0.05, 0.05, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, folder / "model.safetensors")
    return folder


def show(size: int, runs: list[list[Figures]]) -> None:
    for rank in range(size):
        figures = [each[rank] for each in runs]
        load, held, files = (
            statistics.median(getattr(each, name) for each in figures) for name in ("load_s", "held_s", "files_s")
        )
        last = figures[-1]
        over = [(peak - last.shard) / last.largest for peak in (last.peak_load, last.peak_proof)]
        print(
            f"{size:3} {rank:5} {load:8.2f} {held:8.3f} {files:8.3f} {(held + files) / load:8.1%} "
            f"{last.shard / MIB:9.1f} {last.largest / MIB:9.1f} {last.peak_load / MIB:9.1f} "
            f"{last.peak_proof / MIB:10.1f} {over[0]:9.2f} {over[1]:10.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tp", default="1,2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_model(Path(folder)) if given.model is None else resolve_model(given.model)
        print(
            f"{'tp':>3} {'rank':>5} {'load s':>8} {'held s':>8} {'files s':>8} {'proof':>8} "
            f"{'shard MiB':>9} {'largest':>9} {'peak load':>9} {'peak proof':>10} {'over load':>9} "
            f"{'over proof':>10}"
        )
        for size in map(int, given.tp.split(",")):
            show(size, [run(path, size, given.dtype) for _ in range(given.repeat)])


if __name__ == "__main__":
    main()
