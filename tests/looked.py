"""What every site of every layer reads, under the network's own scheme."""

import jax
import numpy as np

from qrot.calibrate.walk import run
from qrot.model.forward import embedded, layer_context, project, windows
from qrot.model.layer import rope_table
from qrot.rotation.transform import of_layer
from qrot.scheme import layer_schemes
from qrot.sites import SITES


def everything(seen):
    return seen


def site_inputs(network, tokens):
    """(Logits, {site: [layers, batch * length, ...], what its readers read before rounding})."""
    config = network.config
    hidden = embedded(network, tokens)
    rope, limits = rope_table(config, hidden.shape[1], hidden.dtype), windows(config)
    found = {site: [] for site in SITES}
    for i, grids in enumerate(layer_schemes(network.scheme, config.num_hidden_layers)):
        layer, window = jax.tree.map(lambda x: x[i], (network.params.layers, limits))  # noqa: B023
        context = layer_context(network, of_layer(network.online, i), window, rope, grids)
        hidden, seen = run(hidden, layer, context, names=tuple(SITES), statistic=everything)
        for site, x in seen.items():
            found[site].append(np.asarray(x).reshape(-1, *x.shape[2:]))
    return project(network, hidden), {site: np.stack(x) for site, x in found.items()}
