"""The table of a run, from plain rows."""

import math

from qrot.report.results import cells, columns, markdown


def row(method, seed, nll, **more):
    facts = {"weights": 4, "activations": 4, "keys": 4, "values": 8, "seconds": 2.0}
    return {
        "method": method,
        "seed": seed,
        "nll": nll,
        "perplexity": math.exp(nll),
        **facts,
        **more,
    }


def test_the_table_takes_seeds_together():
    rows = [
        row("full_precision", None, 3.0, weights=16, activations=16, keys=16, values=16),
        row("no_rotation", None, 12.0),
        row("random_hadamard", 0, 4.9),
        row("random_hadamard", 1, 5.1),
        row("learned", 0, 4.5, objective="cross_entropy", steps=9, trained_weight_bits=4,
            shifts=True, scales=False, clips=True, optimiser="cayley_adam", start="hadamard"),
    ]  # fmt: skip
    full, rtn, hadamard, learned = cells(rows)
    assert full == ("full precision", "", "20.09", "", "", "2")
    assert rtn[2:5] == ("162,755", "9.000", "")
    assert hadamard[1:5] == ("2", "149.16 ± 21.02", "2.000", "0.0%")
    assert learned[3:5] == ("1.500", "25.0%")
    protocol = dict.fromkeys(
        ("model", "note", "text", "count", "window", "stride", "bos", "logits", "norms"), "x"
    )
    text = markdown({"protocol": protocol, "rows": rows})
    assert "| random hadamard | 2 | 149.16 ± 21.02 | 2.000 | 0.0% | 2 |" in text
    assert "at W4A4K4V8 on" in text
    assert "Learned: cross entropy with weights at 4 bits, with shifts, clips, 9 steps" in text
    assert cells(rows[1:2])[0][3:5] == ("", "")
    others = [{**row, "other_perplexity": 50.0} for row in rows]
    assert columns(others)[2:4] == ("perplexity", "other text")
    assert cells(others)[2][3] == "50.00 ± 0.00"
