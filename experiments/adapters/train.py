"""A LoRA of all projections, trained on text in JAX: python train.py DIR OUT [--steps 40].

DIR holds WikiText-2's raw files. The last windows of its training text are what the LoRA learns
from; a run calibrates on windows from all of it and judges on the test text.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from peft_folder import Update, per_layer, write_adapter

from qrot.evaluate.losses import token_nll
from qrot.evaluate.perplexity import Windows, cut_windows
from qrot.model.forward import forward
from qrot.model.io.load import load
from qrot.model.io.tokenizer import encode
from qrot.model.params import Network
from qrot.rotation.random import stream
from qrot.sites import PROJECTIONS
from qrot.text import Data, read_texts

RANK, ALPHA, LENGTH = 8, 16.0, 512


def beginning(network: Network) -> dict[str, Update]:
    """As PEFT begins: a is uniform, b is zero, so that nothing is changed yet."""
    draw, found = stream(0, "lora"), {}
    for name in PROJECTIONS:
        layers, inputs, outputs = network.params.layers.linear(name).weight.shape
        bound = inputs**-0.5
        a = draw.uniform(-bound, bound, (layers, inputs, RANK))
        found[name] = Update(jnp.asarray(a, jnp.float32), jnp.zeros((layers, RANK, outputs)))
    return found


def with_lora(network: Network, lora: dict[str, Update]) -> Network:
    """The network with the updates in its weights."""
    layers = network.params.layers
    for name, (a, b) in lora.items():
        linear = layers.linear(name)
        weight = linear.weight + ALPHA / RANK * (a @ b)
        layers = layers.replace(**{name: linear.replace(weight=weight)})
    return network.replace(params=network.params.replace(layers=layers))


def loss(lora: dict[str, Update], network: Network, rows: Any) -> jax.Array:
    """Nats a token."""
    return token_nll(forward(with_lora(network, lora), rows, remat=True), rows).mean()


def main() -> None:
    """Train, printing a line a step, and write the PEFT folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", help="the folder with wiki.train*.raw and wiki.test.raw")
    parser.add_argument("out", type=Path, help="the PEFT folder to write")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    model = load("smollm2")
    network = model.network
    texts = read_texts(Data("wikitext2", arguments.data))
    tokens = encode(model.tokenizer, texts.calibration, network.config.vocab_size)
    rows = cut_windows(tokens, Windows(LENGTH, None))[-2 * arguments.steps :]
    lora = beginning(network)
    schedule = optax.cosine_decay_schedule(1e-3, arguments.steps)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    state: Any = optimiser.init(lora)

    @jax.jit
    def step(lora, state, network, rows):
        value, gradient = jax.value_and_grad(loss)(lora, network, rows)
        change, state = optimiser.update(gradient, state, lora)
        return optax.apply_updates(lora, change), state, value

    began = time.perf_counter()
    for i in range(arguments.steps):
        lora, state, value = step(lora, state, network, jnp.asarray(rows[2 * i : 2 * i + 2]))
        seconds = time.perf_counter() - began
        left = seconds / (i + 1) * (arguments.steps - i - 1)
        print(f"step {i + 1}/{arguments.steps}: {value:.3f} nats, {left:.0f} s left", flush=True)
    stacked = {name: Update(*map(np.asarray, update)) for name, update in lora.items()}
    write_adapter(arguments.out, per_layer(stacked, network.config.num_hidden_layers), ALPHA)
    print(f"{arguments.out}: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
