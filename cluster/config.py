"""What a user may set about a cluster, checked and with defaults; the same for the CLI, YAML and Python.

Knows settings; knows nothing of Ray, torch or how a setting is carried out.
"""

import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from cluster.errors import InvalidConfig

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_BYTES_END = 2**63
_SHOWN_CHARACTERS = 60  # of a wrong value, in the message about it


def parse_bytes(value: Any) -> Any:
    """`2GiB` -> 2147483648; integers and None pass. Raises ValueError for anything that is not a size."""
    if value is None:
        return None
    size = value if isinstance(value, int) else _size(str(value))
    if size >= _BYTES_END:
        raise ValueError(f"a size in bytes must be below {_BYTES_END}")
    return size


def _size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text, re.IGNORECASE)
    if match is None:
        shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
        raise ValueError(f"not a size in bytes: {shown!r} (examples: 2GiB, 512MiB, 1000000)")
    number = min(Decimal(match[1]), Decimal(_BYTES_END))  # exact, unlike a float
    return int(number * _UNITS[(match[2] or "").lower()])


ByteSize = Annotated[int, BeforeValidator(parse_bytes)]


def parse_shares(value: Any) -> Any:
    """`2,1` -> ["2", "1"], for the types to judge; anything but text passes."""
    return value.split(",") if isinstance(value, str) else value


Shares = Annotated[tuple[Annotated[int, Field(ge=1, le=1000)], ...], BeforeValidator(parse_shares)]


class ClusterConfig(BaseModel):
    """One served model and the worker group that runs it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="local folder, .gguf file, hub id org/name[@revision], or a built-in name")
    served_model_name: str | None = Field(
        None, min_length=1, description="the name in the API; default: from `model`"
    )
    tensor_parallel_size: int = Field(1, ge=1, le=1024, description="ranks that hold the model together")
    shard_weights: Shares | None = Field(
        None, description="how the ranks' shards stand to each other, a number a rank: [2, 1]; default: equal"
    )
    replicas: int = Field(1, ge=1, le=1024, description="copies of the model, each with its own ranks and driver")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = Field(None, ge=1, description="tokens a sequence may have; default: the model's")
    kv_cache_memory: ByteSize | None = Field(
        None,
        gt=0,
        description="bytes of KV cache over all ranks; default on CPU: min(2 GiB, 25% of what is free), "
        "on CUDA what gpu_memory_share leaves",
    )
    gpu_memory_share: float = Field(
        0.9, gt=0, le=1, description="of each GPU's memory, for weights, activations and KV cache together"
    )
    cuda_graphs: bool = Field(True, description="on CUDA, replay decode steps from captured graphs")
    block_size: int = Field(16, ge=1, le=1024, description="tokens a KV block holds")
    max_num_seqs: int = Field(256, ge=1, description="sequences in one step at the most")
    max_num_batched_tokens: int = Field(512, ge=1, description="tokens in one step at the most")
    max_waiting_requests: int = Field(512, ge=1, description="more than this many waiting: 429")
    allow_priority: bool = Field(False, description="whether HTTP clients may set the priority of a request")
    max_steps_in_flight: int = Field(2, ge=1, le=2)
    prefix_cache: bool = Field(True, description="compute equal beginnings of prompts once")
    batch_invariant: bool = Field(True, description="equal bits for a sequence in any batch")
    shard_proof: bool = Field(True, description="at the start, compare what the ranks have loaded with the files")
    step_deadline_s: float = Field(60.0, gt=0, description="a step that takes longer is a failure")
    start_deadline_s: float = Field(600.0, gt=0, description="placing, loading and connecting the ranks")
    max_recoveries: int = Field(
        5, ge=0, description="restarts of lost ranks within `recovery_window_s`; one more ends the replica"
    )
    recovery_window_s: float = Field(300.0, gt=0)
    spare: bool | None = Field(
        None, description="a process with everything imported waits for the seat of a rank; default: on CPU"
    )
    drain_deadline_s: float = Field(60.0, ge=0, description="running streams get this long after SIGTERM")

    @model_validator(mode="after")
    def _one_share_a_rank(self) -> "ClusterConfig":
        if self.shard_weights is not None and len(self.shard_weights) != self.tensor_parallel_size:
            raise ValueError(
                f"shard_weights has {len(self.shard_weights)} numbers, but there are {self.tensor_parallel_size} "
                f"ranks (tensor_parallel_size): every rank needs one"
            )
        return self

    @model_validator(mode="after")
    def _budget_covers_sequences(self) -> "ClusterConfig":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs one token a step"
            )
        return self

    @property
    def model_name(self) -> str:
        """The name under which the API serves the model."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")

    def with_files(self, path: Path) -> "ClusterConfig":
        """The same with the model's files in place of where they came from: nobody looks for them again."""
        return self.model_copy(update={"model": str(path), "served_model_name": self.model_name})

    @classmethod
    def parse(cls, settings: dict[str, Any]) -> "ClusterConfig":
        """Validate raw settings. Raises `InvalidConfig` with one line for each mistake."""
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in error.errors()]
            raise InvalidConfig("; ".join(lines)) from None
