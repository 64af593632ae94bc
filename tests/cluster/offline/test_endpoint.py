"""A batch answered by a real model in this process: the same answers and refusals as over HTTP."""

import asyncio
import json
from pathlib import Path

import pytest
import torch

from cluster.config import ClusterConfig
from cluster.offline.batch import prepare, run_batch
from cluster.offline.endpoint import open_endpoint
from tests.fakes.checkpoints import write_counter_model, write_tiny_llama
from tests.fakes.reference import reference_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ClusterConfig:
    folder = tmp_path_factory.mktemp("counter")
    write_counter_model(folder)
    settings = {"model": str(folder), "served_model_name": "counter", "dtype": "float32", "device": "cpu"}
    return ClusterConfig.parse({**settings, "kv_cache_memory": "8MiB", "max_num_seqs": 8})


def _request(custom_id: str, **changes: object) -> str:
    body = {"model": "counter", "prompt": "abc", "max_tokens": 4, "temperature": 0, **changes}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


async def test_a_batch_is_answered_as_over_http(config: ClusterConfig, tmp_path: Path) -> None:
    lines = [_request(str(i), prompt=chr(ord("a") + i)) for i in range(10)]
    lines += [_request("model", model="gpt-4"), _request("range", temperature=9), _request("name", best_off=2)]
    (tmp_path / "in").write_text("\n".join(lines))
    plan = prepare(tmp_path / "in", tmp_path / "out")
    async with open_endpoint(config) as endpoint:
        await run_batch(plan, endpoint, in_flight=5)
    answers = {line["custom_id"]: line["response"] for line in map(json.loads, (tmp_path / "out").open())}
    assert len(answers) == 13
    first = answers["0"]
    assert first["status_code"] == 200
    assert first["request_id"] == first["body"]["id"]
    assert first["body"]["choices"][0]["text"] == "bcde"
    assert answers["9"]["body"]["choices"][0]["text"] == "klmn"
    assert first["body"]["usage"]["completion_tokens"] == 4
    assert (answers["model"]["status_code"], answers["range"]["status_code"]) == (404, 400)
    assert answers["name"]["body"]["error"]["param"] == "best_off"


async def test_a_prompt_is_scored_as_the_reference_scores_it(tmp_path: Path) -> None:
    """Twice, since a prefix hit computes no logits; in chunks; beside a request that generates."""
    folder = write_tiny_llama(tmp_path / "llama")
    settings = {"model": str(folder), "served_model_name": "llama", "dtype": "float32", "device": "cpu"}
    config = ClusterConfig.parse(
        {**settings, "kv_cache_memory": "8MiB", "max_num_batched_tokens": 16, "max_num_seqs": 8}
    )
    prompt = list(range(60, 100))
    with torch.inference_mode():
        reference = reference_model(folder)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [reference[at, token].item() for at, token in enumerate(prompt[1:])]
    async with open_endpoint(config) as endpoint:
        scoring = {"model": "llama", "prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0}
        generating = {"model": "llama", "prompt": prompt, "max_tokens": 20, "temperature": 0, "logprobs": 2}
        answers = [
            *await asyncio.gather(
                *(endpoint.post("/v1/completions", body) for body in (scoring, generating, scoring))
            ),
            await endpoint.post("/v1/completions", scoring),
        ]
    for answer in (answers[0], *answers[2:]):
        assert answer.status == 200, answer.body
        logprobs = answer.body["choices"][0]["logprobs"]
        assert answer.body["choices"][0]["text"] == bytes(prompt).decode()
        assert logprobs["text_offset"] == list(range(40))
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
        likeliest = [max(top.values()) for top in logprobs["top_logprobs"][1:]]
        assert likeliest == pytest.approx(reference[:-1].max(-1).values.tolist(), abs=1e-4)
        assert answer.body["usage"]["completion_tokens"] == 0
        assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    logprobs = answers[1].body["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [max(top.values()) for top in logprobs["top_logprobs"]], "greedy"
