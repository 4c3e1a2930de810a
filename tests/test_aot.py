"""Kernels compiled for chips that are not there: `make aot-tpu`, `make aot-gpu`.

Marked, and deselected by default: they need libtpu or the CUDA plugin.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from kernel_cases import gpu_cases, tpu_cases

from qrot.grid import Grid
from qrot.kernels.dispatch import emulated
from qrot.model.decode import decode_step, empty_cache
from qrot.scheme import Scheme

# What the compiler asks of an H100, as published by NVIDIA: limits, sizes and rates.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84942979072
  device_address_bits: 64 device_vendor: "NVIDIA Corporation" name: "NVIDIA H100 80GB HBM3"
  runtime_version: "12.8.0" driver_version: "12.8.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def compiled(topology, function, shapes, **options):
    sharding = SingleDeviceSharding(topology.devices[0])
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )
    return jax.jit(function, **options).trace(*placed).lower().compile()


@pytest.mark.aot_tpu
@pytest.mark.parametrize("chip", ["v5e:2x2", "v6e:2x2", "tpu7x:2x2x1"])
def test_every_kernel_compiles_for_tpu(chip):
    pytest.importorskip("libtpu")
    topology, failed = topologies.get_topology_desc(chip, platform="tpu"), {}
    for name, (function, shapes) in tpu_cases().items():
        try:
            text = compiled(topology, function, shapes).as_text()
            if "tpu_custom_call" not in text:
                failed[name] = "no kernel in the program"
        except Exception as error:
            failed[name] = str(error)[:300]
    assert not failed


@pytest.mark.aot_gpu
def test_every_kernel_compiles_for_hopper():
    pytest.importorskip("jax_plugins.xla_cuda12")
    topology = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1")
    failed = {}
    for name, (function, shapes) in gpu_cases().items():
        try:
            text = compiled(topology, function, shapes).as_text()
            if "mosaic_gpu" not in text:
                failed[name] = "no kernel in the program"
        except Exception as error:
            failed[name] = str(error)[:300]
    assert not failed


def same_place(topology, model, implementation):
    """No code of the cache is copied in a decode step: a token is written in place, and the kernel
    reads the cache of all layers there."""
    grid = Grid(4, "asymmetric")
    network = model.network.replace(scheme=Scheme(keys=grid, values=grid))
    batch, length = 128, 8192  # more than there is room for on a TPU, where XLA may move it

    def step(tokens, leaves, weights):
        cache = jax.tree.unflatten(tree, leaves)
        logits, cache = decode_step(jax.tree.unflatten(whole, weights), tokens, cache)
        return logits, jax.tree.leaves(cache)

    def empty(length):  # no container of shapes: its fields are checked
        return empty_cache(network, batch, length, packed=True)

    tree = jax.tree.structure(empty(1))
    weights, whole = jax.tree.flatten(network)
    leaves = jax.eval_shape(lambda: jax.tree.leaves(empty(length)))
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    with emulated(implementation, False):
        program = compiled(topology, step, (tokens, leaves, weights), donate_argnums=1)
    text = program.as_text()
    assert {"pallas_tpu": "tpu_custom_call", "mosaic_gpu": "mosaic_gpu"}[implementation] in text
    layer = math.prod(leaves[0].shape[1:])
    large = [
        (name, operation)
        for name, sizes, operation in re.findall(r"%(\S+) = s8\[([\d,]+)\]\S* ([\w-]+)\(", text)
        if math.prod(map(int, sizes.split(","))) >= layer
    ]
    assert large
    inert = {"parameter", "get-tuple-element", "bitcast", "dynamic-update-slice"}
    for name, operation in large:  # on a GPU what is written in place is a fusion of that name
        assert operation in inert or "dynamic_update_slice" in name


@pytest.mark.aot_tpu
def test_a_cache_stays_where_it_is_on_tpu(variant):
    pytest.importorskip("libtpu")
    topology = topologies.get_topology_desc("v5e:2x2", platform="tpu")
    same_place(topology, variant("llama", head_dim=64), "pallas_tpu")


@pytest.mark.aot_gpu
def test_a_cache_stays_where_it_is_on_hopper(variant):
    pytest.importorskip("jax_plugins.xla_cuda12")
    topology = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1")
    same_place(topology, variant("llama", head_dim=64), "mosaic_gpu")
