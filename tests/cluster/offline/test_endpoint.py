"""A batch answered by a real model in this process: the same answers and refusals as over HTTP."""

import json
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.offline.batch import prepare, run_batch
from cluster.offline.endpoint import open_endpoint
from tests.fakes.checkpoints import write_counter_model


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
