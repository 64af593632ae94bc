"""Model names: each accepted form, and what is said of those that lead nowhere. No network is used."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils._paths import filter_repo_objects

from model_shards.errors import ModelSourceError
from model_shards.sources import BUILT_IN, resolve_config, resolve_model


def folder_with(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"{}")
    return folder


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(repository: str, **options: Any) -> str:
        raise AssertionError(f"asked the hub for {repository}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "org" / "model", "config.json", "model.safetensors")
    assert resolve_model(str(folder)) == folder


def test_a_folder_named_like_a_hub_id_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_with(tmp_path / "org" / "model", "config.json", "model-00001-of-00002.safetensors")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/model") == Path("org/model")


def test_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = folder_with(tmp_path / "model", "config.json", "model.safetensors")
    assert resolve_model("~/model") == folder


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((), "it has no config.json"),
        (("model.safetensors",), "it has no config.json"),
        (("config.json",), r"it has no \*\.safetensors"),
        (("config.json", "pytorch_model.bin"), "convert them to safetensors"),
        (("README.md", "model.gguf"), r"pass the file itself: .*model\.gguf"),
    ],
)
def test_a_folder_without_a_model_says_what_is_missing(tmp_path: Path, files: tuple[str, ...], words: str) -> None:
    with pytest.raises(ModelSourceError, match=words):
        resolve_model(str(folder_with(tmp_path / "model", *files)))


def test_a_gguf_file_is_itself(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert resolve_model(str(file)) == file


@pytest.mark.parametrize("content", [b"", b"GG", b"<html>not the weights</html>"])
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelSourceError, match="not a GGUF file"):
        resolve_model(str(file))


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "../model", "~/model", "folder/model.gguf"])
def test_a_path_that_does_not_exist_says_so(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ModelSourceError, match="no such file or folder") as caught:
        resolve_model(name)
    assert str(Path(name).expanduser().absolute()) in str(caught.value)
    assert ("looked for" in str(caught.value)) == (name[0] not in "/~"), "a whole path is named once"


@pytest.mark.parametrize("name", ["", " ", "smollm", "SMOLLM2-135M", "a/b/c", "org/", "a" * 5000, "~nobody-here"])
def test_an_unknown_name_lists_the_forms_and_the_built_in_names(name: str) -> None:
    with pytest.raises(ModelSourceError) as caught:
        resolve_model(name)
    if len(name) < 100 and not name.startswith("~"):
        assert "hub id org/name" in str(caught.value)
        assert all(built_in in str(caught.value) for built_in in BUILT_IN)


class FakeHub:
    """Stands for `snapshot_download`: keeps what it was asked, and answers with a folder or an error."""

    def __init__(self, answer: Path | Exception) -> None:
        self.answer = answer
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, repository: str, **options: Any) -> str:
        self.calls.append((repository, options))
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def use_hub(monkeypatch: pytest.MonkeyPatch, answer: Path | Exception) -> FakeHub:
    hub = FakeHub(answer)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    return hub


@pytest.mark.parametrize(
    ("name", "repository", "revision"),
    [
        ("org/some-model_1.5", "org/some-model_1.5", None),
        ("org/model@v1.0", "org/model", "v1.0"),
        ("org/model@refs/pr/3", "org/model", "refs/pr/3"),
    ],
)
def test_a_hub_id(
    name: str, repository: str, revision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = use_hub(monkeypatch, folder_with(tmp_path / "snapshot", "config.json", "model.safetensors"))
    said: list[str] = []
    assert resolve_model(name, on_progress=said.append) == tmp_path / "snapshot"
    assert [(asked, options["revision"]) for asked, options in hub.calls] == [(repository, revision)]
    assert name in said[0]


def test_only_files_that_are_read_are_fetched_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = use_hub(monkeypatch, folder_with(tmp_path / "snapshot", "config.json", "model.safetensors"))
    resolve_model("org/model")
    options = hub.calls[0][1]
    wanted = filter_repo_objects(
        [
            "config.json",
            "chat_template.jinja",
            "model-00001-of-00002.safetensors",
            "tokenizer.json",
            "tokenizer.model",
            "README.md",
            "pytorch_model.bin",
            "model.gguf",
            "consolidated.safetensors",
            "onnx/model.json",
            "original/model.safetensors",
        ],
        allow_patterns=options["allow_patterns"],
        ignore_patterns=options["ignore_patterns"],
    )
    assert list(wanted) == [
        "config.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "tokenizer.json",
        "tokenizer.model",
    ]


@pytest.mark.parametrize(
    "failure",
    [
        FileNotFoundError("offline, and not in the cache\nsecond line"),
        ConnectionError("no route"),
        ValueError("Repo id must be"),
        HfHubHTTPError.__bases__[0]("read timed out"),
    ],
)
def test_a_hub_that_fails_is_named_with_what_was_tried(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, failure)
    with pytest.raises(ModelSourceError) as caught:
        resolve_model("org/model@v2")
    message = str(caught.value)
    assert "org/model@v2" in message
    assert str(failure).splitlines()[0] in message
    assert "second line" not in message
    assert "HF_TOKEN" in message


def test_a_hub_repository_without_safetensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, folder_with(tmp_path / "snapshot", "config.json"))
    with pytest.raises(ModelSourceError, match="safetensors"):
        resolve_model("org/model")


def test_offline_mode_asks_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelSourceError, match="org/not-in-the-cache"):
        resolve_model("org/not-in-the-cache")


@pytest.mark.smollm2
def test_the_built_in_model_is_a_checked_gguf_file(smollm2_path: Path) -> None:
    model = BUILT_IN["smollm2-135m"]
    assert smollm2_path.name == model.file_name
    assert smollm2_path.stat().st_size == model.file_bytes
    assert resolve_model(str(smollm2_path)) == smollm2_path


def test_a_plan_needs_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path / "model", "config.json")
    assert resolve_config(str(folder)) == folder
    with pytest.raises(ModelSourceError, match=r"it has no \*\.safetensors"):
        resolve_model(str(folder))
    hub = use_hub(monkeypatch, folder)
    assert resolve_config("org/model@v2") == folder
    [(_, options)] = hub.calls
    assert (options["allow_patterns"], options["revision"]) == (["config.json"], "v2")
