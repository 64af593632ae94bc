"""`shardserve plan`: what a model takes on each rank and how fast it can be at best, from its config alone."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cluster.cli import options
from cluster.cli.exits import exits

if TYPE_CHECKING:
    from model_shards.roofline import Ceilings
    from workers.config import Device


def plan(
    model: options.Model = None,
    tp: options.TensorParallel = None,
    shard_weights: options.ShardWeights = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Plan for GPUs with this much memory each, e.g. 80GiB (default: for CPU ranks).",
            show_default=False,
        ),
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory: options.KvCacheMemory = None,
    prompt_len: Annotated[
        int, typer.Option(min=1, help="Tokens of the predicted prefill, and of context in a decode.")
    ] = 1024,
    batch: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Sequences in the predicted decode steps.")
    ] = "1,8,32",
    peak_tflops: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="What a rank computes at best (default: H100 or CPU core).", show_default=False
        ),
    ] = None,
    memory_bandwidth: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes a second that a rank reads, e.g. 3350GB.", show_default=False),
    ] = None,
    link_bandwidth: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes a second between ranks, e.g. 450GB.", show_default=False),
    ] = None,
    link_latency_us: Annotated[
        float | None, typer.Option(min=0, help="Microseconds of the smallest all-reduce.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
    config: options.ConfigFile = None,
) -> None:
    """Show what MODEL takes on each of N ranks, and how fast it can be at best. Needs no GPU and no weights."""
    asked = dict(locals())  # every option under its parameter's name
    with exits():
        import json

        from rich.console import Console

        from cluster.cli import plan_report
        from cluster.cli.settings import cluster_config, settings_among
        from cluster.planning import plan_serving, planned_device
        from model_shards.sources import resolve_config
        from model_shards.weights.metadata import read_spec

        settings = cluster_config(settings_among(asked), config)
        memory = None if gpu_memory is None else _size("--gpu-memory", gpu_memory)
        where = planned_device(settings, memory)
        ceilings = _ceilings(where, peak_tflops, memory_bandwidth, link_bandwidth, link_latency_us)
        batches = options.whole_numbers("--batch", batch)
        console = Console()
        spec = read_spec(resolve_config(settings.model))
        made = plan_serving(
            settings,
            spec,
            device=where,
            gpu_memory=memory,
            ceilings=ceilings,
            prompt_len=prompt_len,
            batches=batches,
        )
        if as_json:
            typer.echo(json.dumps(plan_report.as_json(made), indent=2))
            return
        for part in plan_report.report(made, settings):
            console.print(part, highlight=False)


def _ceilings(
    device: "Device",
    peak_tflops: float | None,
    memory_bandwidth: str | None,
    link_bandwidth: str | None,
    link_latency_us: float | None,
) -> "Ceilings":
    from dataclasses import replace

    from model_shards.roofline import CPU, GPU

    given: dict[str, float] = {}
    if peak_tflops is not None:
        given["flops"] = peak_tflops * 1e12
    if memory_bandwidth is not None:
        given["memory_bandwidth"] = _size("--memory-bandwidth", memory_bandwidth)
    if link_bandwidth is not None:
        given["link_bandwidth"] = _size("--link-bandwidth", link_bandwidth)
    if link_latency_us is not None:
        given["link_latency_s"] = link_latency_us * 1e-6
    return replace(GPU if device == "cuda" else CPU, **given)


def _size(option: Literal["--gpu-memory", "--memory-bandwidth", "--link-bandwidth"], text: str) -> int:
    from cluster.config import parse_bytes
    from cluster.errors import InvalidConfig

    try:
        size: int = parse_bytes(text)
    except ValueError as error:
        raise InvalidConfig(f"{option}: {error}") from None
    if size < 1:
        raise InvalidConfig(f"{option}: must be more than 0, not {text!r}")
    return size
