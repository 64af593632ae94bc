"""From the name of a model to local files: a folder, a .gguf file, a hub id or a built-in name.

Owns what the name may look like and what is said when it leads nowhere. Reads no weights and loads no torch;
whether the architecture is supported is found by whoever reads the files.
"""

import re
from pathlib import Path
from typing import cast

from model_shards.built_in import BUILT_IN, BuiltInModel, Report, cache_folder, ensure_built_in
from model_shards.errors import ModelSourceError

__all__ = ["BUILT_IN", "BuiltInModel", "resolve_config", "resolve_model"]

_HUB_ID = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer*"]
# Sub-folders hold other formats of the same weights (onnx/, original/), consolidated files a second copy of them.
_HUB_LEFT_OUT = ["*/*", "consolidated*.safetensors"]
_FORMS = "a folder in Hugging Face layout, a .gguf file, a hub id org/name[@revision], or a built-in name"


def resolve_model(name: str, *, on_progress: Report | None = None) -> Path:
    """The folder or .gguf file that holds the model, fetched first if need be.

    A built-in name wins over a folder of that name (write `./smollm2-135m` for the folder); an existing path wins
    over a hub id. `on_progress` gets one line a call. Raises `ModelSourceError` that says what was tried.
    """
    return _resolve(name, on_progress or _silent, with_weights=True)


def resolve_config(name: str, *, on_progress: Report | None = None) -> Path:
    """As `resolve_model`, but a folder needs no weights, and of a hub id only the config is fetched."""
    return _resolve(name, on_progress or _silent, with_weights=False)


def _resolve(name: str, report: Report, *, with_weights: bool) -> Path:
    if name in BUILT_IN:
        return ensure_built_in(BUILT_IN[name], cache_folder(), report)
    try:
        path = Path(name).expanduser()
        if name and path.exists():
            return _local_model(path, with_weights)
    except (OSError, RuntimeError) as error:  # expanduser: no such user
        raise ModelSourceError(f"cannot read {name[:200]}: {error}") from error
    if name.startswith(("/", "./", "../", "~")) or name.endswith(".gguf"):
        looked_for = "" if path.is_absolute() else f" (looked for {path.absolute()})"
        raise ModelSourceError(f"no such file or folder: {path}{looked_for}")
    if hub_id := _HUB_ID.fullmatch(name):
        return _hub_model(hub_id["repository"], hub_id["revision"], report, with_weights)
    raise ModelSourceError(
        f"unknown model {name!r}: no file or folder here has that name, and it is not a hub id. "
        f"A model is {_FORMS} ({', '.join(BUILT_IN)})"
    )


def _silent(line: str) -> None:
    """The caller did not ask for progress."""


def _local_model(path: Path, with_weights: bool) -> Path:
    if path.is_dir():
        return _checked_folder(path, with_weights)
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise ModelSourceError(f"{path} is not a GGUF file (it begins with {magic!r}); a model is {_FORMS}")
    return path


def _checked_folder(folder: Path, with_weights: bool) -> Path:
    files = sorted(file.name for file in folder.iterdir())
    if "config.json" in files and (not with_weights or any(name.endswith(".safetensors") for name in files)):
        return folder
    missing = "*.safetensors" if "config.json" in files else "config.json"
    gguf = [name for name in files if name.endswith(".gguf")]
    hint = f"; for a GGUF model pass the file itself: {folder / gguf[0]}" if gguf else ""
    if missing == "*.safetensors" and any(name.endswith((".bin", ".pt", ".pth")) for name in files):
        hint = "; PyTorch pickle files are not read: convert them to safetensors"
    raise ModelSourceError(f"{folder} holds no model in Hugging Face layout: it has no {missing}{hint}")


def _hub_model(repository: str, revision: str | None, report: Report, with_weights: bool) -> Path:
    # Imported here because it costs half a second, which local and built-in models need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # The HTTP library under the hub client changes with its version; the root of its errors is among these bases.
    failures = cast(tuple[type[Exception], ...], (OSError, ValueError, *HfHubHTTPError.__bases__))
    shown = f"{repository}@{revision}" if revision else repository
    report(f"fetching {shown} from the hub (into its cache, unless it is there)")
    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=_HUB_FILES if with_weights else ["config.json"],
            ignore_patterns=_HUB_LEFT_OUT,
        )
    except failures as error:
        raise ModelSourceError(
            f"cannot get {shown}: no local folder has that name, and the hub client failed with "
            f"{type(error).__name__}: {_first_line(error)}. Private and gated models need HF_TOKEN; "
            f"HF_HUB_OFFLINE=1 uses only what is cached"
        ) from error
    return _checked_folder(Path(folder), with_weights)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no further word"])[0]
