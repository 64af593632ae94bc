"""What several commands share: options, and how lists are written.

A setting's option is its name with dashes; only --tp is shorter.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A folder in Hugging Face layout, a .gguf file, a hub id (org/name or org/name@revision), or a "
        "built-in name (smollm2-135m). May come from --config instead.",
        show_default=False,
    ),
]
TensorParallel = Annotated[
    int | None, typer.Option("--tp", help="Ranks that hold the model together (default: 1).", show_default=False)
]
Replicas = Annotated[
    int | None,
    typer.Option(help="Copies of the model, each with its own ranks (default: 1).", show_default=False),
]
ShardWeights = Annotated[
    str | None,
    typer.Option(
        metavar="N,N[,...]",
        help="How the ranks' shards stand to each other, for unequal GPUs: 2,1 (default: equal).",
        show_default=False,
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Where to compute (default: auto).", show_default=False),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"] | None,
    typer.Option(help="How to compute (default: auto).", show_default=False),
]
ServedModelName = Annotated[
    str | None,
    typer.Option(help="The name in the API and in request files (default: from MODEL).", show_default=False),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Tokens a sequence may have (default: what the model can).", show_default=False),
]
KvCacheMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="KV cache over all ranks, e.g. 2GiB (default on CPU: 2GiB or 25% of what is free).",
        show_default=False,
    ),
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(help="Sequences in one step at the most (default: 256).", show_default=False)
]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option(help="Tokens in one step at the most (default: 512).", show_default=False)
]
PrefixCache = Annotated[
    bool | None,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Compute equal beginnings of prompts once (default: yes).",
        show_default=False,
    ),
]
ShardProof = Annotated[
    bool | None,
    typer.Option(
        "--shard-proof/--no-shard-proof",
        help="At the start, compare what the ranks have loaded with the files (default: yes).",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML with settings by name (tensor_parallel_size: 2); options given here win.",
        show_default=False,
    ),
]


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """`1,8,32` -> (1, 8, 32). Raises `InvalidConfig` for anything but whole numbers from 1 on."""
    from cluster.errors import InvalidConfig

    try:
        numbers = tuple(int(number) for number in text.split(",") if number.strip())
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise InvalidConfig(f"{option}: whole numbers from 1 on, with commas between, are wanted, not {text!r}")
    return numbers
