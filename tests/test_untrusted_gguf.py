"""GGUF files of which nothing is true: loaded right, or refused in a sentence that says where."""

import struct
import tracemalloc

import gguf
import ggufs
import numpy as np
import pytest
from ggufs import Raw, text
from hypothesis import given, settings
from hypothesis import strategies as st

from qrot.errors import InputError, located
from qrot.model.io.assemble import assemble
from qrot.model.io.gguf import open_gguf
from qrot.model.io.gguf_header import dequantise
from qrot.model.io.load import load

PARTS = ggufs.parts()
NAN, INF = float("nan"), float("inf")
LONG, DOUBLE, BYTE, BOOL, STRING, ARRAY = 10, 12, 0, 7, 8, 9  # GGUF value types


def checked(path):
    stored = open_gguf(path)
    with located(path):
        assemble(stored, np.float32)
    return stored.config


def refused(path):
    """The sentence, after the path that it begins with."""
    with pytest.raises(InputError) as error:
        checked(path)
    start, sentence = f"{path}: ", str(error.value)
    assert sentence.startswith(start)
    assert "\n" not in sentence
    assert len(sentence) < len(start) + 250
    return sentence.removeprefix(start)


def test_what_is_not_changed_loads(tmp_path):
    for architecture in ("llama", "qwen2", "qwen3"):
        path = ggufs.parts(architecture).write(tmp_path / f"{architecture}.gguf")
        assert load(str(path)).network.config.architecture == architecture


@pytest.mark.parametrize(
    "changes",
    [
        {"llama__attention__causal": True},
        {"llama__attention__head_count_kv": [2]},
        {"llama__feed_forward_length": [56], "llama__attention__head_count": [4]},
        {"llama__vocab_size": 97, "llama__rope__dimension_count": 12},
        {"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 4.0},
        {"llama__rope__scaling__original_context_length": 8},
        {"llama__rope__scaling__finetuned": True},
        {"llama__rope__freq_base": 10000, "llama__pooling_type": 3},
        {"llama__tensor_data_layout": "Meta AI original pth"},
        {"general__type": "model", "general__quantization_version": 2, "general__file_type": 3},
        {"general__alignment": 32, "general__name": "x", "general__tags": ["a", "b"]},
        {"split__count": 1, "split__no": 0, "split__tensors__count": 12},
        {"split__count": 0},  # of a file that was split and is merged again
        {"tokenizer__ggml__bos_token_ids": [1], "tokenizer__ggml__padding_token_ids": [400]},
        {"quantize__imatrix__file": "x", "mradermacher__quantize_version": "2"},
        {"tokenizer__ggml__padding_token_id": 400, "tokenizer__ggml__add_bos_token": False},
        {"tokenizer__ggml__model": "llama", "tokenizer__chat_template": "{{ x }}"},
        {"tokenizer__ggml__bos_token_id": None, "tokenizer__ggml__eos_token_id": None},
        {"llama__block_count": Raw(LONG, struct.pack("<Q", 1))},
        {"llama__attention__layer_norm_rms_epsilon": Raw(DOUBLE, struct.pack("<d", 1e-6))},
    ],
)  # fmt: skip
def test_settings_that_are_known_pass(tmp_path, changes):
    checked(PARTS.with_(**changes).write(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    "key",
    [
        "attention.sliding_window",
        "attention.scale",
        "attention.clamp_kqv",
        "attention.max_alibi_bias",
        "attn_logit_softcapping",
        "embedding_scale",
        "expert_count",
        "logit_scale",
        "rope.dimension_sections",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_log_multiplier",
        "use_parallel_residual",
        "",
        "block_count.0",
        "of_next_year",
    ],
)
@pytest.mark.parametrize("value", [0, 1, 0.0, False, "", []])
def test_settings_that_are_unknown_are_refused_whatever_their_value(tmp_path, key, value):
    path = PARTS.with_(**{f"llama.{key}": value}).write(tmp_path / "a.gguf")
    assert refused(path) == f"the setting llama.{key} is not supported."


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("llama.attention.causal", [False, 0, 1, "true", [True]]),
        ("llama.block_count", [0, -1, "1", 1.0, True, [1], Raw(LONG, b"\xff" * 8), 2, None]),
        ("llama.embedding_length", [0, -48, "48", 48.0, [48], 2**31, None]),
        ("llama.feed_forward_length", [0, -56, "56", True, [56, 56], [], ["56"], 2**32 - 1, None]),
        ("llama.context_length", [0, -1, "128", NAN, 2**31, None]),
        ("llama.attention.head_count", [0, -4, "4", 4.0, [4, 4], [], None]),
        ("llama.attention.head_count_kv", [0, -2, "2", 2.5, [2, 2], [], [True], [2.0]]),
        ("llama.attention.key_length", [0, "12", True, [12]]),
        ("llama.attention.value_length", [0, 6, "12", True, [12]]),
        ("llama.rope.dimension_count", [0, 6, "12", True, [12]]),
        ("llama.vocab_size", [0, 96, 98, "97", True, [97]]),
        (
            "llama.attention.layer_norm_rms_epsilon",
            [NAN, INF, 0.0, -1e-5, 1e-30, 2.0, "1e-5", True, 0, [1e-5]],
        ),
        ("llama.rope.freq_base", [NAN, INF, -INF, 0.0, -1e4, 1e-9, 1e30, "10000", True, 0, [1e4]]),
        ("llama.rope.scale_linear", [NAN, INF, 0.0, -1.0, 1e-30, 1e30, "2", True, [2.0]]),
        ("llama.rope.scaling.factor", [NAN, INF, 0.0, -1.0, 1e-30, 1e30, "2", True, [2.0]]),
        ("llama.rope.scaling.type", ["yarn", "longrope", 0, False, ["linear"]]),
        ("tokenizer.ggml.bos_token_id", [-1, 97, 2**32 - 1, "1", 1.0, True, [1]]),
        ("tokenizer.ggml.eos_token_id", [-1, 97, "2", 2.0, False, [2]]),
        ("tokenizer.ggml.eot_token_id", [-1, 97, "2", 2.0, False, [2]]),
        ("tokenizer.ggml.eom_token_id", [-1, 97, "2", 2.0, False, [2]]),
        ("tokenizer.ggml.eos_token_ids", [[97], [-1], ["2"], 2, "2", [True], [2, 3.0]]),
        ("tokenizer.ggml.tokens", [["a"], ["a"] * 98, []]),
        ("general.architecture", ["gemma2", "", "clip", 3, ["llama"], None]),
        ("general.type", ["adapter", "mmproj", "imatrix", "", 1, True, ["model"]]),
        ("general.quantization_version", [0, 1, 3, "2", 2.0, True]),
        ("general.alignment", [0, 3, 33, -32, "32", 32.0, True, [32], 2**31]),
        ("general.alignment", [Raw(LONG, struct.pack("<Q", 2**40))]),
        ("split.count", [-1, 2, "1", 1.0, True, [1]]),
        ("split.no", [1, "0", False]),
        ("adapter.type", ["lora"]),
        ("adapter.lora.alpha", [0.0]),
        ("clip.has_vision_encoder", [False]),
        ("qwen2.attention.causal", [True]),
    ],
)
def test_values_that_no_model_has(tmp_path, key, values):
    for value in values:
        sentence = refused(PARTS.with_(**{key: value}).write(tmp_path / "a.gguf"))
        named = {"general.architecture": "architecture", "llama.rope.scaling.type": "rope"}
        words = "layers" if value == 2 and "block" in key else named.get(key, key)
        assert (words if "split" not in key else "split over") in sentence, (value, sentence)


def test_a_size_that_differs_from_layer_to_layer(tmp_path):
    path = PARTS.with_(llama__block_count=2, llama__attention__head_count_kv=[2, 4])
    sentence = refused(path.write(tmp_path / "a.gguf"))
    assert sentence.startswith("llama.attention.head_count_kv differs from layer to layer")


def test_two_factors_that_differ(tmp_path):
    both = {"llama__rope__scale_linear": 2.0, "llama__rope__scaling__factor": 4.0}
    assert "differ" in refused(PARTS.with_(**both).write(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    "divisors",
    [
        np.ones(5),
        np.ones(7),
        np.ones(1),
        np.ones((1, 6)),
        np.zeros(6),
        -np.ones(6),
        np.full(6, NAN),
        np.array([1, 1, 1, 1, 1, INF]),
        np.arange(1, 7),
    ],
)
def test_divisors_of_frequencies_that_are_none(tmp_path, divisors):
    model = ggufs.parts(extra={"rope_freqs.weight": divisors})
    if divisors.shape == (1, 6):
        checked(model.write(tmp_path / "a.gguf"))
        return
    assert "rope_freqs.weight" in refused(model.write(tmp_path / "a.gguf"))


def test_divisors_of_frequencies_are_alone_and_of_a_llama(tmp_path):
    ones = {"rope_freqs.weight": np.ones(6)}
    model = ggufs.parts(extra=ones).with_(llama__rope__scaling__factor=2.0)
    assert "beside rope_freqs.weight" in refused(model.write(tmp_path / "a.gguf"))
    # llama.cpp computes a Qwen without them.
    assert "hold the tensor rope_freqs" in refused(
        ggufs.parts("qwen2", extra=ones).write(tmp_path / "b.gguf")
    )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (PARTS.moved("blk.0.attn_q.weight", offset=1), "blk.0.attn_q.weight: its data are not"),
        (PARTS.moved("blk.0.attn_q.weight", offset=0), "overlap"),
        (PARTS.moved("output.weight", offset=2**62), "the tensor output.weight runs past"),
        (PARTS.moved("output.weight", axes=(48, 2**40)), "the tensor output.weight runs past"),
        (PARTS.moved("output.weight", axes=(2**63, 2**63, 2**63)), "output.weight runs past"),
        (PARTS.moved("output.weight", axes=(48, 0)), "output.weight: it is empty"),
        (PARTS.moved("output.weight", axes=()), "output.weight: it has 0 axes"),
        (PARTS.moved("output.weight", axes=(1,) * 5), "output.weight: it has 5 axes"),
        (PARTS.moved("output.weight", axes=(97, 48)), "shape [48, 97]"),
        (PARTS.moved("output.weight", axes=(48, 97, 1)), "shape [1, 97, 48]"),
        (PARTS.moved("output.weight", axes=(48,)), "shape [48]"),
        (PARTS.moved("token_embd.weight", axes=(48, 96)), "shape"),
        (PARTS.moved("output.weight", kind=999), "output.weight: its type, 999, is unknown"),
        (PARTS.moved("output.weight", kind=26), "output.weight: its type, I32, cannot be deq"),
        (PARTS.moved("output.weight", kind=8), "output.weight: Q8_0 needs rows that are mult"),
        (PARTS.named(output__weight="output.scale"), "hold the tensor output.scale"),
        (PARTS.named(output__weight="lm_head.weight"), "hold the tensor lm_head.weight"),
        (PARTS.named(output__weight=""), "hold the tensor ''"),
        (PARTS.named(output__weight="\x1b[2J"), r"hold the tensor '\x1b[2J'"),
        (PARTS.named(blk__0__attn_q__weight="model.layers.0.self_attn.q_proj.weight"), "hold the"),
        (PARTS.named(blk__0__attn_q__weight="blk.00.attn_q.weight"), "lack the tensor"),
        (PARTS.named(blk__0__attn_q__weight="blk.0.attn_q.bias"), "lack the tensor"),
        (PARTS.named(token_embd__weight="x"), "lack the tensor token_embd.weight"),
    ],
)  # fmt: skip
def test_tensors_that_cannot_be(tmp_path, model, words):
    assert words in refused(model.write(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([("a", 1), ("b", 1), ("a", 1)], "the key a is there twice"),
        ([("a", Raw(13, b""))], "a: a value is of type 13"),
        ([("a", Raw(2**32 - 1, b""))], "a: a value is of type 4294967295"),
        ([("a", Raw(BOOL, b"\2"))], "a: a boolean is neither"),
        ([("a", Raw(ARRAY, struct.pack("<IQ", BOOL, 2) + b"\0\2"))], "a: a boolean is neither"),
        ([("a", Raw(ARRAY, struct.pack("<IQ", ARRAY, 1)))], "a: a list holds values of type 9"),
        ([("a", Raw(ARRAY, struct.pack("<IQ", 99, 1)))], "a: a list holds values of type 99"),
        ([("a", Raw(ARRAY, struct.pack("<IQ", BYTE, 2**60)))], "a: truncated"),
        ([("a", Raw(ARRAY, struct.pack("<IQ", LONG, 2**63)))], "a: truncated"),
        ([("a", Raw(ARRAY, struct.pack("<IQ", STRING, 2**60)))], "a: truncated"),
        ([("a", Raw(STRING, struct.pack("<Q", 2**63)))], "a: truncated"),
        ([("a", Raw(STRING, text(b"\xff")))], "a: a text before byte"),
        ([("a", Raw(STRING, text("\ud800".encode("utf-8", "surrogatepass"))))], "a: a text before"),
        ([(b"\xff\xfe", 1)], "a text before byte"),
        ([("\x1b[2J" * 99, Raw(13, b""))], r"'\x1b[2J"),
    ],
)
def test_metadata_that_cannot_be(tmp_path, pairs, words):
    path = tmp_path / "a.gguf"
    path.write_bytes(ggufs.header(pairs, []) + bytes(1000))
    assert words in refused(path)


def test_names_of_tensors_that_cannot_be(tmp_path):
    path, place = tmp_path / "a.gguf", ggufs.Place((4,), 0, 0)
    path.write_bytes(ggufs.header([], [("a", place), ("a", place)]) + bytes(99))
    assert "the tensor a is there twice" in refused(path)
    path.write_bytes(ggufs.header([], [(b"\xff", place)]) + bytes(99))
    assert "is not UTF-8" in refused(path)


@pytest.mark.parametrize("count", [2**20, 2**31, 2**60, 2**64 - 1])
def test_counts_are_bounded_before_anything_is_made_of_them(tmp_path, count):
    tracemalloc.start()
    for which in ("pair_count", "tensor_count"):
        path = PARTS.write(tmp_path / "a.gguf", **{which: count})
        assert "truncated or not a valid GGUF file" in refused(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_sparse_file_is_not_unfolded(tmp_path):
    """Of 4 TB that are nothing but empty texts."""
    path = tmp_path / "a.gguf"
    for kind in (STRING, BYTE):
        start = ggufs.header([("a", Raw(ARRAY, struct.pack("<IQ", kind, 2**38)))], [])
        with path.open("wb") as file:
            file.write(start)
            file.truncate(1 << 42)
        assert "truncated" in refused(path)
    path.write_bytes(start[:4] + struct.pack("<IQQ", 3, 0, 2**22))
    with path.open("ab") as file:
        file.truncate(1 << 30)
    assert "the key" in refused(path)


def test_weights_that_are_not_finite(tmp_path):
    place, data = PARTS.places["output.weight"], bytearray(PARTS.data)
    data[place.offset : place.offset + 4] = np.float32(NAN).tobytes()
    path = PARTS._replace(data=bytes(data)).write(tmp_path / "a.gguf")
    with pytest.raises(InputError, match=r"a\.gguf: lm_head\.weight contains NaN or Inf"):
        load(str(path))


def test_a_scale_that_is_not_finite_does_not_warn():
    kind = gguf.GGMLQuantizationType.Q8_0
    rows = gguf.quantize(np.ones((2, 32), np.float32), kind)
    rows[1, :2] = np.frombuffer(np.float16(INF).tobytes(), np.uint8)
    rows[1, 2:] = 0  # infinity times 0
    assert np.isnan(dequantise(rows, kind)[1]).all()


VALUES = (
    st.integers(-(2**31), 2**32 - 1)
    | st.floats(width=32)
    | st.booleans()
    | st.text(max_size=8)
    | st.lists(st.integers(0, 100), max_size=4)
    | st.builds(Raw, st.integers(0, 13), st.binary(max_size=24))
)
HEADER = ggufs.header(PARTS.pairs.items(), PARTS.places.items())


@st.composite
def mutations(draw):
    """A file that differs from the good one in one place or a few."""
    kind = draw(st.sampled_from(["value", "place", "name", "bytes", "cut"]))
    if kind == "value":
        key = draw(st.sampled_from([*PARTS.pairs, "llama.attention.causal", "split.count"]))
        return PARTS._replace(pairs={**PARTS.pairs, key: draw(VALUES)})
    name = draw(st.sampled_from(list(PARTS.places)))
    if kind == "place":
        sizes = st.sampled_from([0, 1, 12, 32, 48, 97, 2**31, 2**63]) | st.integers(0, 2**64 - 1)
        axes = tuple(draw(st.lists(sizes, max_size=5)))
        kind = draw(st.integers(0, 45) | st.integers(0, 2**32 - 1))
        offset = draw(st.sampled_from([PARTS.places[name].offset]) | sizes)
        return PARTS.moved(name, axes=axes, kind=kind, offset=offset)
    if kind == "name":
        new = draw(st.sampled_from(list(PARTS.places)) | st.text(max_size=20))
        return PARTS.named(**{name: new})
    content = bytearray(HEADER)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content) - 1))
        new = draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8)]))
        content[at : at + len(new)] = new
    content += bytes(-len(content) % 32) + PARTS.data
    return bytes(content[: draw(st.integers(0, len(content)))] if kind == "cut" else content)


@settings(max_examples=200, deadline=None)
@given(mutations())
def test_a_mutation_loads_or_is_a_sentence(tmp_path_factory, mutation):
    path = tmp_path_factory.getbasetemp() / "mutation.gguf"
    if isinstance(mutation, bytes):
        path.write_bytes(mutation)
    else:
        mutation.write(path)
    config, sentence = None, f"{path}: "
    try:
        config = checked(path)
    except InputError as error:
        sentence = str(error)
    assert sentence.startswith(f"{path}: ")
    assert sentence.isprintable()
    if config is not None:
        assert 1 <= config.rope_theta < INF
        assert 0 < config.rms_norm_eps <= 1
        assert config.vocab_size == 97
