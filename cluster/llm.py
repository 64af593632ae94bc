"""`LLM`: a model in a script, offline. Every prompt of a call is batched in one engine.

With tp=1 the rank lives in this process; with more, on a Ray of its own that ends with it, or on the one that this
process is connected to. Text comes from the same code as over HTTP. Knows requests and text; knows no HTTP.
"""

import contextlib
import queue
import uuid
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cluster.config import ClusterConfig
from cluster.driver.driver import StartedGroup, engine_config
from cluster.driver.resolution import ModelFiles, check_model
from cluster.engine.loop import Engine
from cluster.errors import GenerationFailed, InvalidConfig, StartupFailed
from cluster.generation import (
    Completion,
    GenerationRequest,
    RequestOptions,
    SamplingParams,
    TextDelta,
    TokenDelta,
)
from cluster.text.chat_template import ChatMessage, load_chat_template
from cluster.text.choice import CompletionBuilder, RequestText
from cluster.text.prompts import Prompt, PromptEncoder
from cluster.text.tokenizer import load_tokenizer
from model_shards.errors import ModelError

_POLL_S = 1.0  # between looks at whether the engine still lives
_OFFLINE_QUEUE = 2**31  # a batch waits in the engine, however long it is


class LLM:
    """Owns an engine and its ranks until `close()`; a context manager closes it. Several threads may call it.

    `settings` are those of `ClusterConfig`. Raises `InvalidConfig` or `StartupFailed`.
    """

    def __init__(self, model: str, tp: int = 1, **settings: Any) -> None:
        settings.setdefault("max_waiting_requests", _OFFLINE_QUEUE)
        config = ClusterConfig.parse({"model": model, "tensor_parallel_size": tp, **settings})
        self._sinks: dict[str, queue.SimpleQueue[TokenDelta]] = {}
        with contextlib.ExitStack() as taken:
            group = start_offline_group(config, taken)
            taken.callback(group.executor.stop)
            path = Path(group.model.path)
            self._tokenizer = load_tokenizer(path)
            self._encoder = PromptEncoder(
                self._tokenizer, load_chat_template(path), group.model.max_model_len, group.model.vocab_size
            )
            self._engine = Engine(group.executor, engine_config(config, group.model), self._publish)
            self._engine.start()
            taken.callback(self._engine.stop)
            self._taken = taken.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks, and Ray if it was started here. Idempotent."""
        self._taken.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> list[Completion]:
        """One completion for each prompt, in order. A prompt is text or token ids.

        Raises `InvalidRequest` before anything runs, `GenerationFailed` or `Unavailable` later.
        """
        requests = [self._request(prompt, sampling, options) for prompt in _as_list(prompts)]
        return self._complete(requests)

    def chat(
        self,
        conversations: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> list[Completion]:
        """One answer for each conversation; one conversation may be given bare."""
        many: Any = [conversations] if conversations and isinstance(conversations[0], dict) else conversations
        requests = [
            self._checked(self._encoder.encode_chat(messages), sampling, options, "messages") for messages in many
        ]
        return self._complete(requests)

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Iterator[TextDelta]:
        """The text of one prompt as it comes. Leaving the loop ends the request."""
        with contextlib.closing(self._run([self._request(prompt, sampling, options)])) as deltas:
            for _, delta in deltas:
                yield delta

    def _request(
        self, prompt: Prompt, sampling: SamplingParams | None, options: RequestOptions | None
    ) -> GenerationRequest:
        return self._checked(self._encoder.encode(prompt), sampling, options, "prompt")

    def _checked(
        self,
        token_ids: tuple[int, ...],
        sampling: SamplingParams | None,
        options: RequestOptions | None,
        field: str,
    ) -> GenerationRequest:
        return self._encoder.check(_new_id(), token_ids, sampling or SamplingParams(), field, options=options)

    def _complete(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        builders = {request.request_id: CompletionBuilder(request) for request in requests}
        with contextlib.closing(self._run(requests)) as deltas:
            for request_id, delta in deltas:
                builders[request_id].add(delta)
        return [builder.completion() for builder in builders.values()]

    def _run(self, requests: Sequence[GenerationRequest]) -> Generator[tuple[str, TextDelta], None, None]:
        """Submit all and yield what each gains, until all have finished. Ends early what is left."""
        texts = {request.request_id: RequestText(request, self._tokenizer) for request in requests}
        sink: queue.SimpleQueue[TokenDelta] = queue.SimpleQueue()
        try:
            for request in requests:
                self._sinks[request.request_id] = sink
                self._engine.submit(request)
            while texts:
                delta = self._next(sink)
                text = texts[delta.request_id].push(delta) if delta.request_id in texts else None
                if text is None:
                    continue
                if text.finish_reason is not None and delta.finish_reason is None:
                    self._engine.finish_choice(delta.request_id, delta.choice)
                if texts[delta.request_id].finished:
                    del texts[delta.request_id]
                yield delta.request_id, text
        finally:
            for request in requests:
                self._sinks.pop(request.request_id, None)
            for request_id in texts:
                self._engine.abort(request_id)

    def _next(self, sink: "queue.SimpleQueue[TokenDelta]") -> TokenDelta:
        while True:
            try:
                return sink.get(timeout=_POLL_S)
            except queue.Empty:
                if self._engine.failure is not None:
                    raise GenerationFailed(self._engine.failure) from None

    def _publish(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            sink = self._sinks.get(delta.request_id)
            if sink is not None:
                sink.put(delta)


def start_offline_group(config: ClusterConfig, taken: contextlib.ExitStack) -> StartedGroup:
    """Ranks without Serve: one in this process, or several on a Ray that `taken` ends if it was started here.

    Raises `InvalidConfig` or `StartupFailed`.
    """
    if config.replicas != 1:
        raise InvalidConfig(f"replicas: a server has several; offline there is one, not {config.replicas}")
    if config.tensor_parallel_size == 1:
        from cluster.driver.local_executor import start_local_group

        return start_local_group(config)
    from cluster.driver.local_ray import ensure_ray

    config = _checked(config)
    ranks = config.tensor_parallel_size
    taken.enter_context(ensure_ray(ranks, gpus=ranks if config.device == "cuda" else 0))
    from cluster.driver.ray_executor import start_ray_group

    if config.spare is None:
        config = config.model_copy(update={"spare": False})  # nobody waits for a stream here
    return start_ray_group(config)


def _checked(config: ClusterConfig) -> ClusterConfig:
    """Refuse what the model's numbers rule out before Ray is started for it. With the files, which are found."""
    try:
        files = ModelFiles.of(config.model)
        check_model(config, files.spec)
    except ModelError as error:
        raise StartupFailed(str(error)) from error
    return config.with_files(files.path)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A bare prompt is text, or a sequence of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [[item for item in prompts if isinstance(item, int)]]
    return [prompt for prompt in prompts if not isinstance(prompt, int)]


def _new_id() -> str:
    return uuid.uuid4().hex
