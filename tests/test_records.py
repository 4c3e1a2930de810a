"""Records: found by what they are, and the ways to round weights among them."""

import dataclasses
import sys
from typing import NamedTuple

import jax
import numpy as np
import pytest

from qrot.errors import InputError
from qrot.grid import Grid
from qrot.network import fold
from qrot.quantize.qat import Qat
from qrot.quantize.registry import WEIGHT_METHODS
from qrot.records import check_name, collect
from qrot.scheme import Scheme
from qrot.sites import PROJECTIONS


class Toy(NamedTuple):
    name: str
    size: int


def test_records_are_found_in_the_modules_of_a_package(tmp_path, monkeypatch):
    package = tmp_path / "toys"
    package.mkdir()
    (package / "__init__.py").write_text("")
    kind = "from test_records import Toy\n"
    (package / "one.py").write_text(f"{kind}ONE = Toy('one', 1)\nOTHER = ('two', 2)\n")
    (package / "more.py").write_text(f"{kind}from toys.one import ONE\nTHREE = Toy('three', 3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "test_records", sys.modules[__name__])
    assert collect("toys", Toy) == {"one": Toy("one", 1), "three": Toy("three", 3)}


def test_an_unknown_name_is_one_sentence():
    check_name("gptq", WEIGHT_METHODS, "weights.method")
    with pytest.raises(
        InputError, match=r"^weights.method: there is no 'gtpq'; did you mean 'gptq'"
    ):
        check_name("gtpq", WEIGHT_METHODS, "weights.method")
    with pytest.raises(InputError, match="no 'x'; expected one of awq, gptq, qat, quip"):
        check_name("x", WEIGHT_METHODS, "weights.method")


def test_every_method_has_a_record():
    assert {*WEIGHT_METHODS} == {"rtn", "gptq", "awq", "quip", "quip_sharp", "qat"}
    for name, record in WEIGHT_METHODS.items():
        first, *_ = dataclasses.fields(record.settings)
        assert (first.name, first.default) == ("method", name)
        assert record.settings().method == name
        assert record.settings.__pydantic_config__ == {"extra": "forbid"}
        with pytest.raises(dataclasses.FrozenInstanceError):
            record.settings().method = "other"
    assert {name for name, record in WEIGHT_METHODS.items() if record.text == "none"} == {"rtn"}
    assert {n for n, record in WEIGHT_METHODS.items() if record.text == "generated"} == {"qat"}
    assert WEIGHT_METHODS["quip_sharp"].facts(WEIGHT_METHODS["quip_sharp"].settings(seed=3)) == {
        "sign_seed": 3
    }


@pytest.mark.parametrize("name", WEIGHT_METHODS)
def test_all_of_them_are_called_alike(variant, name):
    record = WEIGHT_METHODS[name]
    network = fold(variant("llama").network).replace(scheme=Scheme(Grid(4)))
    rows = np.random.default_rng(0).integers(0, 97, (2, 16), np.int32)
    settings = Qat(steps=2, length=16) if name == "qat" else record.settings()
    record.check(network, settings)
    done = []
    found = record.round(
        network,
        None if record.text == "none" else rows,
        settings,
        batch=1,
        advance=lambda **note: done.append(note),
    )
    parts = {"none": 0, "calibration": 3, "generated": 2}[record.text]
    assert len(done) == parts
    assert (found.scheme, found.config) == (network.scheme, network.config)
    for projection in PROJECTIONS:
        before, after = (x.params.layers.linear(projection) for x in (network, found))
        assert (np.asarray(before.weight) != np.asarray(after.weight)).mean() > 0.9
        assert (after.scale is None) == name.startswith("quip")
    for a, b in zip(
        *(
            jax.tree.leaves((x.params.embed, x.params.head, x.params.norm))
            for x in (network, found)
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
