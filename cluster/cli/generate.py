"""`shardserve generate`: text from a prompt, or answers to a file of requests, without a server."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli import options, sampling_options
from cluster.cli.exits import exits

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from cluster.config import ClusterConfig
    from cluster.offline.batch import BatchPlan


def generate(
    model: options.Model = None,
    prompt: Annotated[
        str | None, typer.Option(help="Go on with this text, shown as it comes.", show_default=False)
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--input", metavar="FILE", help="Requests in OpenAI's batch format.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Answers, in the order they finish; resumed if begun.",
            show_default=False,
        ),
    ] = None,
    max_tokens: sampling_options.MaxTokens = None,
    min_tokens: sampling_options.MinTokens = None,
    temperature: sampling_options.Temperature = None,
    top_p: sampling_options.TopP = None,
    top_k: sampling_options.TopK = None,
    min_p: sampling_options.MinP = None,
    repetition_penalty: sampling_options.RepetitionPenalty = None,
    presence_penalty: sampling_options.PresencePenalty = None,
    frequency_penalty: sampling_options.FrequencyPenalty = None,
    logit_bias: sampling_options.LogitBias = None,
    bad_words: sampling_options.BadWords = None,
    allowed_token_ids: sampling_options.AllowedTokenIds = None,
    seed: sampling_options.Seed = None,
    stop: sampling_options.Stop = None,
    stop_token_ids: sampling_options.StopTokenIds = None,
    include_stop_str_in_output: sampling_options.IncludeStop = None,
    ignore_eos: sampling_options.IgnoreEos = None,
    tp: options.TensorParallel = None,
    shard_weights: options.ShardWeights = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    served_model_name: options.ServedModelName = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_memory: options.KvCacheMemory = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    prefix_cache: options.PrefixCache = None,
    shard_proof: options.ShardProof = None,
    config: options.ConfigFile = None,
) -> None:
    """Generate without a server: from --prompt to the terminal, or from --input to --output."""
    asked = dict(locals())  # every option under its parameter's name
    with exits():
        from cluster.cli.settings import cluster_config, settings_among
        from cluster.logs import configure_logging

        sampling = sampling_options.sampling_fields(asked)
        _check_choice(prompt, source, output, sampling)
        cluster = cluster_config(settings_among(asked), config)
        configure_logging()
        if prompt is not None:
            _stream(cluster, prompt, sampling)
        elif source is not None and output is not None:
            _batch(cluster, source, output)


def _check_choice(prompt: str | None, source: Path | None, output: Path | None, sampling: dict[str, Any]) -> None:
    """Raises `InvalidConfig` unless exactly one way of working is asked for, with options that belong to it."""
    from cluster.errors import InvalidConfig

    if (prompt is None) == (source is None):
        raise InvalidConfig("give either --prompt, or --input with --output")
    if (source is None) != (output is None):
        raise InvalidConfig("--input and --output belong together")
    if source is not None and sampling:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sampling)
        raise InvalidConfig(f"{names}: every request of --input has its own sampling parameters in its body")


def _stream(config: "ClusterConfig", prompt: str, sampling: dict[str, Any]) -> None:
    from cluster.generation import SamplingParams

    params = SamplingParams(**sampling)  # refuses before anything is started
    from rich.console import Console

    from cluster.llm import LLM

    with Console(stderr=True).status(f"loading {config.model}") as status:
        llm = LLM(**_llm_settings(_resolved(config, status.update)))
    with llm:
        for delta in llm.stream(prompt, params):
            typer.echo(delta.text, nl=False)
        typer.echo()


def _llm_settings(config: "ClusterConfig") -> dict[str, Any]:
    settings = config.model_dump(exclude_unset=True)
    return settings | {"tp": settings.pop("tensor_parallel_size", 1)}


def _resolved(config: "ClusterConfig", on_progress: "Callable[[str], None]") -> "ClusterConfig":
    """`config` with the model's files in place of its name, fetched now, where the user sees it."""
    from model_shards.sources import resolve_model

    return config.with_files(resolve_model(config.model, on_progress=on_progress))


def _batch(config: "ClusterConfig", source: Path, output: Path) -> None:
    """Answer what `output` does not have yet, with a bar on stderr and a line of sums at the end."""
    import asyncio

    from rich.console import Console

    from cluster.offline.batch import prepare

    plan = prepare(source, output)
    console = Console(stderr=True)
    left = plan.total - len(plan.done)
    if plan.done:
        console.print(f"{len(plan.done)} of {plan.total} requests are in {output} already", highlight=False)
    if left == 0:
        return
    with console.status(f"loading {config.model}") as status:
        config = _resolved(config, status.update)
    in_flight = 2 * config.max_num_seqs  # the engine always finds the next one waiting
    config = config.model_copy(update={"max_waiting_requests": max(config.max_waiting_requests, in_flight)})
    asyncio.run(_run_batch(config, plan, in_flight, console))


async def _run_batch(config: "ClusterConfig", plan: "BatchPlan", in_flight: int, console: "Console") -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from cluster.offline.batch import Finished, run_batch
    from cluster.offline.endpoint import open_endpoint

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[sums]}"), TimeRemainingColumn())
    failed = tokens = 0
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("requests", total=plan.total, completed=len(plan.done), sums="starting the ranks")

        def show(finished: Finished) -> None:
            nonlocal failed, tokens
            failed += finished.failed
            tokens += finished.completion_tokens
            bar.update(task, advance=1, sums=f"{tokens} tokens, {failed} refused")

        async with open_endpoint(config) as endpoint:
            started = time.monotonic()
            await run_batch(plan, endpoint, in_flight=in_flight, on_finished=show)
    seconds = time.monotonic() - started
    console.print(
        f"{plan.output}: {tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} tok/s), {failed} refused",
        highlight=False,
    )
