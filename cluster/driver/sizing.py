"""How many KV blocks a group of ranks can hold, and how long a sequence may then be: arithmetic only.

Blocks are numbered alike on every rank, so the pool is the smallest that any rank can hold. Ranks may pay
differently for a block (uneven KV heads). Knows bytes and tokens; knows nothing of Ray, torch or how memory was
measured.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.errors import StartupFailed
from workers.config import Device

CPU_LIMIT = 2 * 2**30  # by default a CPU cluster takes at most this much for KV, over all ranks
CPU_SHARE = 0.25  # and at most this share of what is free on a node


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank after loading its weights."""

    node_id: str
    free_bytes: int  # of the node (CPU) or of the rank's own GPU
    bytes_per_block: int
    total_bytes: int = 0  # of the GPU
    activation_bytes: int = 0  # of the largest step, on a GPU


def pool_size(
    ranks: Sequence[RankMemory],
    *,
    device: Device,
    kv_cache_memory: int | None,
    gpu_memory_share: float,
    most_useful: int,
) -> int:
    """Blocks every rank can hold, at most `most_useful` (what the largest batch of longest sequences fills)."""
    if kv_cache_memory is not None:
        fitting = kv_cache_memory // sum(rank.bytes_per_block for rank in ranks)
    elif device == "cuda":
        fitting = min(_left_on_gpu(rank, gpu_memory_share) // rank.bytes_per_block for rank in ranks)
    else:
        fitting = _default_on_cpu(ranks)
    return min(fitting, most_useful)


def _left_on_gpu(rank: RankMemory, share: float) -> int:
    """Of a share of the whole GPU, what weights, other users and the largest step leave."""
    kept_back = rank.total_bytes - int(rank.total_bytes * share)
    return max(0, rank.free_bytes - kept_back - rank.activation_bytes)


def check_room_on_cpu(num_blocks: int, ranks: Sequence[RankMemory]) -> None:
    """Memory is taken as blocks are first written: what is not there would end a rank while it serves.

    Raises `StartupFailed`, with the numbers, where the ranks of a node need more than is free on it.
    """
    for node_id, members in _by_node(ranks).items():
        needed = num_blocks * sum(rank.bytes_per_block for rank in members)
        free = min(rank.free_bytes for rank in members)
        if needed > free:
            raise StartupFailed(
                f"{num_blocks} KV blocks are {needed} bytes for the {len(members)} ranks on node {node_id[:8]}, "
                f"where {free} bytes are free: set kv_cache_memory lower"
            )


def _by_node(ranks: Sequence[RankMemory]) -> dict[str, list[RankMemory]]:
    nodes: dict[str, list[RankMemory]] = defaultdict(list)
    for rank in ranks:
        nodes[rank.node_id].append(rank)
    return nodes


def _default_on_cpu(ranks: Sequence[RankMemory]) -> int:
    fitting = CPU_LIMIT // sum(rank.bytes_per_block for rank in ranks)
    for members in _by_node(ranks).values():
        free = min(rank.free_bytes for rank in members)
        fitting = min(fitting, int(free * CPU_SHARE) // sum(rank.bytes_per_block for rank in members))
    return fitting


def sequence_limit(num_blocks: int, block_size: int, wanted: int, *, explicit: bool, block_bytes: int) -> int:
    """Tokens a sequence may have: `wanted`, or what the pool holds if the user did not ask for it.

    Raises `StartupFailed`, with the arithmetic, when an asked-for length or even one block does not fit.
    """
    held = num_blocks * block_size
    if held >= wanted:
        return wanted
    if explicit or num_blocks < 1:
        needed = -(-wanted // block_size)
        shorter = f" or max_model_len to {held} or lower" if num_blocks else ""
        raise StartupFailed(
            f"one sequence of max_model_len {wanted} tokens needs {needed} KV blocks of {block_size} tokens, "
            f"{needed} x {block_bytes} = {needed * block_bytes} bytes over all ranks; {num_blocks} blocks "
            f"({num_blocks * block_bytes} bytes) fit: set kv_cache_memory higher{shorter}"
        )
    return held
