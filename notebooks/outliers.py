# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # The outlier problem, and what a rotation does to it
#
# A few channels of a language model's activations are far larger than the rest. A 4-bit grid has
# sixteen levels, and its largest value sets their distance: one large channel leaves nothing for
# the others. Here is that problem in SmolLM2-135M, and the cure.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from qrot.calibrate.capture import capture_hidden
from qrot.evaluate.outliers import outliers
from qrot.evaluate.perplexity import Windows, cut_windows
from qrot.grid import Grid, fake_quantise
from qrot.model.io.load import load
from qrot.model.io.tokenizer import encode
from qrot.network import fold, fuse, logits
from qrot.rotation.random import random_rotations
from qrot.rotation.transform import Transform
from qrot.scheme import Scheme
from qrot.text import Data, read_texts

model = load("smollm2")
network = fold(model.network)
text = read_texts(Data()).evaluation  # the manual that Python ships
tokens = encode(model.tokenizer, text, network.config.vocab_size)
rows = cut_windows(tokens, Windows(length=256, count=1))

# %% [markdown]
# ## One layer's residual stream
#
# All layers read from and write to one vector a token, the residual stream. This is it in front of
# the layer where its largest value is: the first 48 tokens, each a row, every channel a column.

# %%
hidden = capture_hidden(network, rows)[:, 0]  # [layers and behind the last, tokens, channels]
layer = int(np.abs(hidden).max((1, 2)).argmax())
x = jnp.asarray(hidden[layer], jnp.float32)
transform = Transform(random_rotations(network.config, seed=0))
rotated = transform.rotations["residual"].apply(x)


def picture(axis, values, title):
    size = np.log10(np.abs(values[:48]) + 1e-2)
    image = axis.imshow(size, aspect="auto", cmap="magma", vmin=0, vmax=2.5)
    axis.set(title=title, xlabel="channel", ylabel="token")
    return image


figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
picture(axes[0], x, f"before layer {layer}")
image = picture(axes[1], rotated, "times a random Hadamard matrix")
figure.colorbar(image, ax=axes, label="log10 |x|")
# %% [markdown]
# The vertical lines are outlier channels. The bright first row is the first token, which the
# network uses as a place to attend to when there is nothing to attend to. A rotation leaves the
# length of every row as it is, and spreads it over all channels.

# %%
for name, values in {"before": x, "after": rotated}.items():
    told = outliers(values)
    largest = np.argsort(-np.asarray(told.largest))[:3]
    channels = ", ".join(f"{i}: {told.largest[i]:,.0f}" for i in largest)
    print(f"{name:>7}: largest channels {channels}; largest by median channel {told.ratio:,.1f}")

# %% [markdown]
# ## What rounding does to it
#
# Each token is rounded to sixteen levels between its smallest and its largest value.

# %%
grid = Grid(bits=4, kind="asymmetric", granularity="token")
for name, values in {"before": x, "after": rotated}.items():
    error = fake_quantise(values, grid) - values
    share = jnp.square(error).sum(1) / jnp.square(values).sum(1)
    print(f"{name:>7}: median error {float(jnp.median(share)):.2%} of a token's energy")

token = 100
figure, axes = plt.subplots(1, 2, figsize=(10, 3), sharey=True, layout="constrained")
for axis, values, title in zip(axes, (x, rotated), ("before", "after"), strict=True):
    row = values[token]
    axis.plot(row, ".", ms=2)
    for level in np.unique(np.asarray(fake_quantise(row[None], grid))):
        axis.axhline(level, lw=0.4, color="grey")
    axis.set(title=f"token {token}, {title}; lines: the levels", xlabel="channel")

# %% [markdown]
# The error is measured against the energy of the whole token, outliers included: what counts is
# that before the rotation nearly all channels fall on one or two levels, and carry no information.
#
# ## And to the network
#
# The rotation is multiplied into the weights, and back out of the next ones: the function is the
# same. Then activations, keys and values are rounded, the weights are not.

# %%
scheme = Scheme(activations=grid, keys=Grid(4, "asymmetric"), values=Grid(4, "asymmetric"))
fused = fuse(network, transform)


def nats(network):
    """The mean loss of a token."""
    z = logits(network, jnp.asarray(rows))[0, :-1]
    z = z - z.max(-1, keepdims=True)
    chosen = jnp.take_along_axis(z, jnp.asarray(rows)[0, 1:, None], axis=-1)[:, 0]
    return float((jnp.log(jnp.exp(z).sum(-1)) - chosen).mean())


for name, loss in {
    "full precision": nats(network),
    "full precision, rotated": nats(fused),
    "4 bits": nats(network.replace(scheme=scheme)),
    "4 bits, rotated": nats(fused.replace(scheme=scheme)),
}.items():
    print(f"{name:>24}: {loss:6.3f} nats a token, perplexity {np.exp(loss):,.1f}")

# %% [markdown]
# The first two are equal: a rotation costs nothing. The last two are the difference between
# a network that has collapsed and one that is hurt; `learn_a_rotation` heals it further.
