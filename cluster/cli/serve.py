"""`shardserve serve`: start everything, say how to use it, stay until told to stop, leave nothing."""

import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cluster.cli import options
from cluster.cli.exits import exits

if TYPE_CHECKING:
    from cluster.config import ClusterConfig
    from cluster.launch.launcher import LaunchOptions


def serve(
    model: options.Model = None,
    tp: options.TensorParallel = None,
    shard_weights: options.ShardWeights = None,
    replicas: options.Replicas = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on; 0.0.0.0 for all (default: 127.0.0.1).", show_default=False),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on (default: 8000).", show_default=False)
    ] = None,
    served_model_name: options.ServedModelName = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory: options.KvCacheMemory = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    prefix_cache: options.PrefixCache = None,
    shard_proof: options.ShardProof = None,
    max_waiting_requests: Annotated[
        int | None, typer.Option(help="More waiting than this: 429 (default: 512).", show_default=False)
    ] = None,
    allow_priority: Annotated[
        bool | None,
        typer.Option(
            "--allow-priority/--no-allow-priority",
            help="Let HTTP clients set the priority of a request (default: no).",
            show_default=False,
        ),
    ] = None,
    spare: Annotated[
        bool | None,
        typer.Option(
            "--spare/--no-spare",
            help="A process (some 200 MB) waits for the seat of a worker that dies (default: yes on CPUs).",
            show_default=False,
        ),
    ] = None,
    drain_deadline_s: Annotated[
        float | None,
        typer.Option(help="Seconds that running streams get at the end (default: 60).", show_default=False),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="The Ray to serve on: local (one of our own), auto (the one that runs here) or HOST:PORT.",
            show_default="local; where a Ray runs, you choose",
        ),
    ] = None,
    proxy: Annotated[
        Literal["auto", "serve", "haproxy"] | None,
        typer.Option(
            help="What takes HTTP in: Serve's own proxy or HAProxy (default: auto, which is Serve's).",
            show_default=False,
        ),
    ] = None,
    config: options.ConfigFile = None,
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API on this machine, until Ctrl-C."""
    asked = dict(locals())  # every option under its parameter's name
    with exits():
        from cluster.cli.settings import serve_settings, settings_among

        cluster, launch_options = serve_settings(settings_among(asked), config)
        run(cluster, launch_options)


def run(config: "ClusterConfig", launch_options: "LaunchOptions") -> None:
    """Serve until told to stop."""
    from rich.console import Console

    from cluster.cli.foreground import launched

    console = Console()
    each = f" in each of {config.replicas} replicas" if config.replicas > 1 else ""
    console.print(f"serving {config.model} with {config.tensor_parallel_size} rank(s){each}", highlight=False)
    with launched(config, launch_options, console) as serving:
        console.print(
            f"\nready after {serving.progress.elapsed_s:.1f} s: {serving.url}/v1   model: {serving.model}\n"
        )
        console.print(chat_line(serving.url, serving.model), markup=False, highlight=False, soft_wrap=True)
        console.print(f"\n{client_line(serving.ray_address)}", markup=False, highlight=False, soft_wrap=True)
        if serving.logs is not None:
            console.print(f"\nlogs: {serving.logs}", highlight=False, soft_wrap=True)
        console.print("\nCtrl-C drains the running streams and ends; a second one ends at once.")
        serving.wait_for_stop()
        console.print("ending: running streams may finish first")


def client_line(ray_address: str) -> str:
    """How a Python process on this machine gets at the same model without HTTP."""
    return f'Python: from shardserve import Client; client = Client.connect(address="{ray_address}")'


def chat_line(url: str, model: str) -> str:
    """A command that makes a streamed chat request."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
