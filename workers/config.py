"""The settings one worker is started with. Plain numbers and names; knows nothing of users' files or HTTP."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES: Mapping[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Equal on every rank of a group; `rank` comes beside it. All values are resolved, none is "auto"."""

    model_path: str  # a local folder in Hugging Face layout, or a .gguf file
    tensor_parallel_size: int
    device: Device
    dtype: Dtype
    block_size: int  # tokens a KV block holds
    max_model_len: int  # tokens a sequence may have, prompt and output together
    max_num_seqs: int  # sequences in one step at the most
    max_num_batched_tokens: int  # tokens in one step at the most
    batch_invariant: bool = True  # equal bits for a row in any batch, CPU only
    cuda_graphs: bool = True  # replay decode steps, CUDA only
    shard_weights: tuple[int, ...] = ()  # how the ranks' shards stand to each other; empty: equal
    shard_proof: bool = True  # say after loading what is in memory, for the driver to compare with the files
    num_threads: int = 1  # intra-op threads of this rank, CPU only
    step_deadline_s: float = 60.0  # a collective or a step that takes longer is a failure
    start_deadline_s: float = 300.0  # forming the group, loading, allocating
