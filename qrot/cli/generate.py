"""qrot generate."""

from __future__ import annotations

from typing import Annotated

import typer


def generate(
    model: Annotated[
        str,
        typer.Argument(help="A run folder, a file of one, or a model as in a config."),
    ],
    prompt: Annotated[str, typer.Argument(help="The text to go on from.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 takes the likeliest token, 1 draws as the model says.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Draw among so many of the likeliest.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of what is drawn.")] = 0,
    scheme: Annotated[
        str | None, typer.Option(help="W4A4KV4 or the like, in place of the run's.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Round them anew by this method: rtn, gptq or another.")
    ] = None,
    row: Annotated[
        str | None, typer.Option(help="Of the run's results, where it kept several networks.")
    ] = None,
) -> None:
    """Let a quantised model write, its weights and cache kept as integers.

    A run writes with the network that it kept. A model of no run is left at full precision, or with
    --scheme gets a random Hadamard rotation.
    """
    import time

    from rich.console import Console

    from qrot import generate as module
    from qrot.errors import located
    from qrot.model.io.tokenizer import encode
    from qrot.progress import Stages

    chosen = None if scheme is None else module.scheme_named(scheme)
    console = Console(stderr=True)
    with Stages(console) as stages:
        opened, network = module.open_network(
            model, stages, scheme=chosen, weights=weights, row=row
        )
    tokenizer = opened.tokenizer
    with located("prompt"):
        start = encode(tokenizer, prompt, network.config.vocab_size)
    module.check_prompt(network.config, start, tokens)
    marks = [time.perf_counter()]
    options = {"steps": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    print(prompt, end="", flush=True)
    all_tokens, shown = list(start), tokenizer.decode(list(start))
    for token in module.written(network, start, **options):
        marks.append(time.perf_counter())
        all_tokens.append(token)
        text = tokenizer.decode(all_tokens)
        if not text.endswith("\ufffd"):  # half of a character is not shown yet
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print()
    console.print(module.summary(network, len(start), marks), highlight=False)
