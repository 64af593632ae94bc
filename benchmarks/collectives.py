"""What a collective costs: shared memory beside gloo, two CPU ranks of one host, microseconds a call.

    python -m benchmarks.collectives

Each rank is a process with one thread. An operation is timed on rank 0, from call to return, back to back, after
a warm-up; median and p99 of the calls.

Expected on two idle cores: an all-reduce of 1 KB through shared memory in 7 to 15 us, of which some 2 us are two
torch calls and the rest Python and the flight of two cache lines; over gloo about 280 us, nearly all of it waking
threads. At 64 KB still several times apart. At 1 MB both are bound by copying: shared memory moves each part in
and out once, about 200 us, gloo through the kernel's sockets.
"""

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from workers.process_group import WorkerGroup, join_group, open_group

RANKS = 2
SIZES = {"1 KB": 1024, "64 KB": 64 * 1024, "1 MB": 1024 * 1024}
OPERATIONS = ("all_reduce", "all_gather", "broadcast")
SECONDS_EACH = 0.5
WARM_UP = 20
DEADLINE_S = 60.0

Figures = dict[tuple[str, str], tuple[float, float]]  # (operation, size) -> median and p99, us


def measure(rank: int, connection: Connection, same_host: bool) -> None:
    torch.set_num_threads(1)
    rendezvous = None
    if rank == 0:
        rendezvous = open_group(RANKS, "cpu", same_host=same_host, host="127.0.0.1", deadline_s=DEADLINE_S)
        connection.send(rendezvous.address)
    address = connection.recv() if rendezvous is None else rendezvous.address
    group = join_group(
        address, rank, RANKS, deadline_s=DEADLINE_S, step_deadline_s=DEADLINE_S, rendezvous=rendezvous
    )
    figures: Figures = {}
    with torch.inference_mode():
        for name in OPERATIONS:
            for label, num_bytes in SIZES.items():
                tensor = torch.zeros(num_bytes // 4)
                figures[name, label] = time_calls(group, getattr(group, name), tensor)
    group.close()
    if rank == 0:
        connection.send((group.transport, figures))


def time_calls(group: WorkerGroup, operation: Callable[[Tensor], Tensor], tensor: Tensor) -> tuple[float, float]:
    """Median and p99 in microseconds. Rank 0 decides how many calls fit the time, from the warm-up."""
    started = time.perf_counter()
    for _ in range(WARM_UP):
        operation(tensor)
    each = (time.perf_counter() - started) / WARM_UP
    calls = int(group.broadcast(torch.tensor([SECONDS_EACH / each + 1])).item())
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        operation(tensor)
        times.append((time.perf_counter() - started) * 1e6)
    times.sort()
    return times[calls // 2], times[calls * 99 // 100]


def run(same_host: bool) -> tuple[str, Figures]:
    """One transport in two new processes."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(RANKS)]
    processes = [
        context.Process(target=measure, args=(rank, theirs, same_host), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    first, second = (ours for ours, _ in pipes)
    second.send(first.recv())
    answer: tuple[str, Figures] = first.recv()
    for process in processes:
        process.join(DEADLINE_S)
    return answer


def main() -> None:
    print(f"{'transport':14} {'operation':11} {'size':>6} {'median us':>10} {'p99 us':>10}")
    for same_host in (True, False):
        transport, figures = run(same_host)
        for (operation, label), (median, p99) in figures.items():
            print(f"{transport:14} {operation:11} {label:>6} {median:10.1f} {p99:10.1f}")


if __name__ == "__main__":
    main()
