"""`shardserve demo`: SmolLM2 on two ranks of this machine, a streamed answer, and how to go on."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.exits import exits

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.cli.foreground import Serving

_MODEL = "smollm2-135m"
_RANKS = 2
_QUESTION = "In two sentences: why is the sky blue?"
_MAX_TOKENS = 80
_ANSWER_DEADLINE_S = 120.0


def demo(
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    once: Annotated[bool, typer.Option("--once", help="End after the answer instead of serving on.")] = False,
    address: Annotated[
        str | None,
        typer.Option(help="As in `shardserve serve`: local, auto or HOST:PORT.", show_default=False),
    ] = None,
) -> None:
    """Serve SmolLM2-135M on two tensor-parallel ranks, ask it something, show the answer as it comes."""
    with exits():
        from rich.console import Console

        from cluster.cli.foreground import launched
        from cluster.cli.settings import serve_settings

        given = {"model": _MODEL, "tensor_parallel_size": _RANKS, "port": port, "address": address}
        config, options = serve_settings(given, None)
        console = Console()
        console.print(f"{_MODEL} on {_RANKS} tensor-parallel ranks", highlight=False)
        with launched(config, options, console) as serving:
            console.print(f"ready after {serving.progress.elapsed_s:.1f} s at {serving.url}\n", highlight=False)
            _ask(serving, console)
            if once:
                return
            _say_how_to_go_on(serving, console)
            serving.wait_for_stop()


def _ask(serving: "Serving", console: "Console") -> None:
    console.print(f"[bold]> {_QUESTION}[/bold]")
    for text in _answer(serving.url, serving.model):
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
        if serving.stop_requested():
            break
    console.print("\n")


def _answer(url: str, model: str) -> Iterator[str]:
    """The pieces of a streamed chat answer. Raises `Unavailable` when the request fails."""
    import httpx

    from cluster.errors import Unavailable

    body = {
        "model": model,
        "messages": [{"role": "user", "content": _QUESTION}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    client = httpx.Client(timeout=_ANSWER_DEADLINE_S, trust_env=False)
    try:
        with client, client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise Unavailable(f"HTTP {response.status_code}: {response.read().decode(errors='replace')[:300]}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield _piece(json.loads(line[len("data: ") :]))
    except httpx.HTTPError as error:
        raise Unavailable(f"the chat request broke off: {type(error).__name__}: {error}") from error


def _piece(chunk: dict[str, object]) -> str:
    match chunk:
        case {"choices": [{"delta": {"content": str(text)}}, *_]}:
            return text
        case _:
            return ""


def _say_how_to_go_on(serving: "Serving", console: "Console") -> None:
    from cluster.cli.serve import chat_line, client_line

    python = (
        "from openai import OpenAI\n"
        f'client = OpenAI(base_url="{serving.url}/v1", api_key="none")\n'
        f'stream = client.chat.completions.create(model="{serving.model}", stream=True,\n'
        '    messages=[{"role": "user", "content": "Hello!"}])\n'
        'for chunk in stream:\n    print(chunk.choices[0].delta.content or "", end="", flush=True)'
    )
    for heading, text in (("Go on with curl", chat_line(serving.url, serving.model)), ("or in Python", python)):
        console.print(f"[bold]{heading}:[/bold]")
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        console.print()
    console.print(client_line(serving.ray_address), markup=False, highlight=False, soft_wrap=True)
    console.print(f"Load: shardserve bench {serving.url}", highlight=False)
    console.print("Stop: Ctrl-C. Nothing stays behind.")
