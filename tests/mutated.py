"""What becomes of plain values in the hands of others: one part or a few of them, replaced."""

import copy
import math
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

DEEP: Any = []
for _ in range(40):
    DEEP = [DEEP]
NUMBERS = (0, -1, 1, 2, 3, 17, 10**6, 2**31, 2**32, 2**63, 2**70, 10**30, -(2**70), 10**99)
FRACTIONS = (0.0, -0.0, 0.5, 1.5, -1.0, 4.0, 1e-320, 1e30, 1e300, -1e308)
BEYOND = (math.inf, -math.inf, math.nan)
TEXTS = ("", " ", "x", ".", "..", "/", "/dev/null", "a/b", "../x", "4", "1e3", "true", "null")
ODD_TEXTS = ("[/b]", "<b>", "é", "\x1b[31m", "\n", "a\0b", "\ud800", "x" * 5_000, "{", "*", "[")
LISTS = ([], [[]], [1], [None], ["x"], [0, 0], [-1], [{"match": "*"}], [{}], DEEP, [0] * 300)
SECTIONS = ({}, {"x": 1}, {"": 0}, {"method": "gptq"}, {"method": []}, {"bits": 4})
OTHERS = (None, True, False, *LISTS, *SECTIONS)
VALUES = st.sampled_from([*NUMBERS, *FRACTIONS, *BEYOND, *TEXTS, *ODD_TEXTS, *OTHERS])
KEYS = st.sampled_from(["x", "", "method", "bits", "rows", "\x1b", "é", "x" * 5_000, "a.b", "<b>"])


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each part of a value: the list or the section that it is in, and its key there."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


@st.composite
def mutated(draw, *bases: Any, most: int = 3) -> Any:
    """One of some values, with a few of its parts replaced, taken away, put twice or put aside."""
    whole = [copy.deepcopy(draw(st.sampled_from(bases)))]
    for _ in range(draw(st.integers(1, most))):
        above, key = draw(st.sampled_from(list(places(whole))))
        what = draw(st.sampled_from(["replaced"] * 4 + ["gone", "more", "again"]))
        if what == "replaced" or above is whole:
            above[key] = copy.deepcopy(draw(VALUES))
        elif what == "gone":
            del above[key]
        elif isinstance(above, dict):
            above[draw(KEYS)] = copy.deepcopy(draw(VALUES) if what == "more" else above[key])
        else:
            above.append(copy.deepcopy(draw(VALUES) if what == "more" else above[key]))
    return whole[0]
