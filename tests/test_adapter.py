"""Adapters: merged as PEFT's own merge_and_unload does, and refused in a sentence."""

import json
import warnings
from dataclasses import asdict

import models
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from qrot.cli import main
from qrot.errors import InputError
from qrot.files.tensors import open_tensor_file
from qrot.identity import difference
from qrot.model.adapter.combine import Combining
from qrot.model.adapter.config import parse_adapter_config
from qrot.model.adapter.merge import merged
from qrot.model.adapter.read import read_adapter
from qrot.model.adapter.source import Merge, Weighted
from qrot.model.io.assemble import EMBED, HEAD
from qrot.model.io.load import load, local_config, open_model
from qrot.rotation.store import load_rotations, save_rotations
from qrot.rotation.transform import Transform

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def base_folder(tmp_path, name="llama"):
    folder = tmp_path / "base"
    if not folder.exists():
        architecture, own = models.VARIANTS[name]
        models.write_folder(folder, architecture, **own)
    return folder


def their_base(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def trained(folder, out, seed=0, **settings):
    """A PEFT adapter whose every parameter was moved, and the model with it merged by PEFT."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(their_base(folder), config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(out)
        return model.merge_and_unload()


def ours(folder, *adapters, weights=None, **settings):
    """The merged tensors of a base and adapters, and the configuration."""
    base = open_tensor_file(folder / "model.safetensors")[0]
    combining = Combining(weights or (1.0,) * len(adapters), **settings)
    read = [read_adapter(path) for path in adapters]
    config, tensors = merged(local_config(str(folder)), base, read, combining)
    return config, {name: tensor.whole() for name, tensor in tensors.items()}


def assert_same(tensors, theirs, but=()):
    state = {name: x.numpy() for name, x in theirs.state_dict().items() if name not in but}
    assert {*state} <= {*tensors, HEAD}
    for name, x in tensors.items():
        if name not in but:
            np.testing.assert_allclose(x, state[name], rtol=1e-5, atol=1e-6, err_msg=name)


SETTINGS = {
    "lora": {"r": 4, "lora_alpha": 8, "target_modules": LINEAR},
    "rslora": {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": LINEAR,
        "rank_pattern": {"q_proj": 2, r"model\.layers\.1\.mlp\.up_proj": 3},
        "alpha_pattern": {"down_proj": 3},
    },
    "dora": {"r": 4, "use_dora": True, "target_modules": LINEAR},
    "a regular expression": {"target_modules": r".*\.layers\.[12]\.(self_attn|mlp)\.[qd].*_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "some layers": {"target_modules": ["v_proj", "o_proj"], "layers_to_transform": [0, 2]},
    "an embedding": {"r": 4, "target_modules": ["embed_tokens", "v_proj"]},
    "an embedding by DoRA": {"r": 4, "use_dora": True, "target_modules": ["embed_tokens"]},
    "modules to save": {"target_modules": ["k_proj"], "modules_to_save": ["lm_head", "norm"]},
    "the head": {"target_modules": ["lm_head"]},
    "fan_in_fan_out": {"target_modules": ["k_proj"], "fan_in_fan_out": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_merges_as_peft_does(tmp_path, name):
    folder = base_folder(tmp_path)
    theirs = trained(folder, tmp_path / "adapter", **SETTINGS[name])
    _, tensors = ours(folder, tmp_path / "adapter")
    assert_same(tensors, theirs)
    base = load_file(folder / "model.safetensors")
    assert any(not np.array_equal(base[n], tensors[n]) for n in base)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases(tmp_path, bias):
    folder = base_folder(tmp_path, "qwen2")
    theirs = trained(folder, tmp_path / "adapter", target_modules=["q_proj"], bias=bias)
    assert_same(ours(folder, tmp_path / "adapter")[1], theirs)


def test_bias_of_an_update(tmp_path):
    folder = base_folder(tmp_path, "qwen2")
    theirs = trained(folder, tmp_path / "adapter", target_modules=["q_proj"], lora_bias=True)
    assert_same(ours(folder, tmp_path / "adapter")[1], theirs)


@pytest.mark.parametrize(
    ("by", "theirs", "density"),
    [("sum", "cat", None), ("linear", "linear", None), ("ties", "ties", 0.5)],
)
def test_several_adapters_as_peft_does(tmp_path, by, theirs, density):
    folder, weights = base_folder(tmp_path), (0.7, -0.4)
    for i, name in enumerate("ab"):
        trained(folder, tmp_path / name, seed=i, r=4, target_modules=["q_proj", "down_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(their_base(folder), tmp_path / "a", "a")
        model.load_adapter(tmp_path / "b", "b")
        more = {} if density is None else {"density": density}
        model.add_weighted_adapter(["a", "b"], [*weights], "both", theirs, **more)
        model.set_adapter("both")
        model = model.merge_and_unload(adapter_names=["both"])
    settings = {"by": by} if density is None else {"by": by, "density": density}
    _, tensors = ours(folder, tmp_path / "a", tmp_path / "b", weights=weights, **settings)
    assert_same(tensors, model)


def test_dare_keeps_the_update_on_average(tmp_path):
    folder = base_folder(tmp_path)
    for i, name in enumerate("ab"):
        trained(folder, tmp_path / name, seed=i, r=4, target_modules=["q_proj"])
    both = tmp_path / "a", tmp_path / "b"
    name = "model.layers.0.self_attn.q_proj.weight"
    sums = ours(folder, *both, by="linear")[1][name]
    draws = [
        ours(folder, *both, by="dare_linear", density=0.8, seed=i)[1][name] for i in range(200)
    ]
    spread = np.std(draws, axis=0) / np.sqrt(len(draws))
    assert np.mean(np.abs(np.mean(draws, axis=0) - sums) < 3 * spread + 1e-7) > 0.98
    again = [ours(folder, *both, by="dare_ties", density=0.8, seed=1)[1][name] for _ in range(2)]
    np.testing.assert_array_equal(*again)


def test_a_tied_head_stays_what_training_saw(tmp_path):
    folder = base_folder(tmp_path, "llama-tied")
    settings = {"r": 4, "target_modules": ["embed_tokens"]}
    trained(folder, tmp_path / "adapter", **settings)
    config, tensors = ours(folder, tmp_path / "adapter")
    base = load_file(folder / "model.safetensors")
    assert not config.tie_word_embeddings
    np.testing.assert_array_equal(tensors[HEAD], base[EMBED])
    assert not np.array_equal(tensors[EMBED], base[EMBED])


def test_weights_stay_in_their_dtype(tmp_path):
    folder = base_folder(tmp_path)
    trained(folder, tmp_path / "adapter", target_modules=["q_proj"])
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: x.astype(models.ml_dtypes.bfloat16) for name, x in tensors.items()},
        folder / "model.safetensors",
    )
    _, found = ours(folder, tmp_path / "adapter")
    assert {x.dtype.name for x in found.values()} == {"bfloat16"}


def change_settings(folder, **settings):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def change_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    save_file(dict(filter(None, map(change, *zip(*load_file(path).items(), strict=True)))), path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: change_settings(f, peft_type="IA3"), "peft_type is 'IA3'"),
        (lambda f: change_settings(f, r="4"), "r must not be '4'"),
        (lambda f: change_settings(f, r=8), "updates of rank 4 and 4, the settings say 8"),
        (lambda f: change_settings(f, rank_pattern={"(": 4}), "no regular expression"),
        (lambda f: change_settings(f, layer_replication=[[0, 2]]), "layer_replication"),
        (lambda f: change_settings(f, of_tomorrow=True), "of_tomorrow"),
        (lambda f: change_settings(f, init_lora_weights="pissa"), "'pissa'"),
        (lambda f: change_settings(f, target_modules=["q_proj"]), "target_modules does not name"),
        (lambda f: change_settings(f, target_modules=LINEAR), "which target_modules asks for"),
        (lambda f: change_settings(f, use_dora=True), "lacks lora_magnitude_vector"),
        (lambda f: change_settings(f, modules_to_save=["lm_head"]), "modules_to_save names lm_he"),
        (lambda f: change_tensors(f, lambda n, x: (n, x * np.nan)), "contains NaN"),
        (lambda f: change_tensors(f, lambda n, x: (n.replace("s.1", "s.7"), x)), "has no model.la"),
        (lambda f: change_tensors(f, lambda n, x: (n, x[..., :2])), "has updates of rank|of shape"),
        (lambda f: change_tensors(f, lambda n, x: None if "B" in n else (n, x)), "lacks lora_B"),
        (lambda f: change_tensors(f, lambda n, x: (n.replace("lora_", "l_"), x)), "do not say"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x" * 99), "not a safetensors"),
        (
            lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
            "convert adapter_model.bin",
        ),
        (lambda f: (f / "adapter_config.json").unlink(), "no PEFT adapter"),
    ],
)
def test_what_cannot_be_merged_is_refused(tmp_path, damage, message):
    folder = base_folder(tmp_path)
    trained(folder, tmp_path / "adapter", r=4, target_modules=["q_proj", "down_proj"])
    damage(tmp_path / "adapter")
    with pytest.raises(InputError, match=message):
        ours(folder, tmp_path / "adapter")


def test_what_cannot_be_weighted_is_refused(tmp_path):
    folder = base_folder(tmp_path)
    trained(folder, tmp_path / "dora", use_dora=True, target_modules=["q_proj"])
    trained(folder, tmp_path / "saved", target_modules=["q_proj"], modules_to_save=["lm_head"])
    trained(folder, tmp_path / "two", r=2, target_modules=["q_proj"])
    dora, saved, two = (tmp_path / name for name in ("dora", "saved", "two"))
    for adapters, weights, by, message in (
        ([dora], (0.5,), "sum", "merged alone"),
        ([dora, two], None, "sum", "merged alone"),
        ([saved], (0.5,), "sum", "trained whole"),
        ([saved, saved], None, "sum", "another adapter replaces lm_head"),
        ([saved, two], None, "ties", "equal ranks"),
        ([two], (float("nan"),), "sum", "finite weights"),
    ):
        with pytest.raises(InputError, match=message):
            ours(folder, *adapters, weights=weights, by=by)


@pytest.mark.parametrize(
    ("name", "quantised"),
    [
        ("unsloth/llama-3-8b-bnb-4bit", True),
        ("TheBloke/Mistral-7B-GPTQ", True),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", True),
        ("meta-llama/Llama-3.2-1B", False),
        ("mistralai/Mistral-7B-v0.1", False),
    ],
)
def test_a_quantised_base_is_seen_by_its_name(name, quantised):
    config = parse_adapter_config({"peft_type": "LORA", "base_model_name_or_path": name})
    assert config.quantised_base is quantised


def test_a_model_is_merged_while_it_is_loaded(tmp_path):
    folder = base_folder(tmp_path)
    trained(folder, tmp_path / "a", r=4, target_modules=["q_proj"])
    trained(folder, tmp_path / "b", seed=1, r=4, target_modules=["q_proj", "up_proj"])
    adapters = (str(tmp_path / "a"), Weighted(str(tmp_path / "b"), 0.5))
    model = load(Merge(str(folder), adapters))
    _, tensors = ours(folder, tmp_path / "a", tmp_path / "b", weights=(1.0, 0.5))
    name = "model.layers.1.self_attn.q_proj.weight"
    weight = model.network.params.layers.q.weight[1]
    np.testing.assert_array_equal(weight.T, tensors[name])
    assert model.name == f"{folder} + a + 0.5 b"
    base = load(str(folder)).identity.fingerprint
    apart = difference(base.tensors, model.identity.fingerprint.tensors)
    assert apart == (
        "model.layers.0.mlp.up_proj.weight differs, and so do 5 of the other 29 tensors"
    )


def test_a_fingerprint_is_of_values_however_they_are_stored(tmp_path):
    folder = base_folder(tmp_path)
    first = load(str(folder)).identity.fingerprint
    tensors = load_file(folder / "model.safetensors")
    other = tmp_path / "other"
    models.write_folder(other, "llama", max_position_embeddings=64)
    half = {name: x.astype(models.ml_dtypes.bfloat16) for name, x in tensors.items()}
    save_file(half, other / "model.safetensors")
    narrow = load(str(other)).identity.fingerprint
    wide = {name: x.astype(np.float32) for name, x in half.items()}
    save_file(wide, other / "model.safetensors")
    assert load(str(other)).identity.fingerprint == narrow
    assert difference(first.tensors, first.tensors) is None
    assert "differs" in difference(first.tensors, narrow.tensors)
    models.write_folder(other, "llama", rope_theta=77.0)
    assert difference(first.tensors, load(str(other)).identity.fingerprint.tensors) == (
        "the settings differ (config.json)"
    )


def test_a_base_of_another_name_or_quantised_is_told(tmp_path):
    folder = base_folder(tmp_path)
    trained(folder, tmp_path / "a", target_modules=["q_proj"])
    for name, message in (("org/other", "was trained on org/other"), ("x-bnb-4bit", "quantised")):
        change_settings(tmp_path / "a", base_model_name_or_path=name)
        with pytest.warns(UserWarning, match=message):
            load(Merge(str(folder), (str(tmp_path / "a"),)))


def merge_command(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["qrot", "merge", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_a_merged_folder_is_the_model_that_peft_makes(tmp_path, monkeypatch, capsys):
    folder, out = base_folder(tmp_path, "llama-tied"), tmp_path / "merged"
    theirs = trained(folder, tmp_path / "a", r=4, target_modules=LINEAR)
    assert merge_command(monkeypatch, folder, tmp_path / "a", "--out", out) == 0
    assert "base + a" in " ".join(capsys.readouterr().out.split())  # it breaks lines
    opened = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = torch.arange(40)[None] % 97
    with torch.no_grad():
        logits, expected = (model(tokens).logits for model in (opened, theirs))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    here = load(Merge(str(folder), (str(tmp_path / "a"),)))
    assert load(str(out)).identity.fingerprint == here.identity.fingerprint
    assert load(str(out)).network.config == here.network.config


def test_tokens_that_an_adapter_adds(tmp_path, monkeypatch):
    folder, out = base_folder(tmp_path), tmp_path / "merged"
    trained(folder, tmp_path / "a", target_modules=["q_proj"])
    change_settings(tmp_path / "a", modules_to_save=["embed_tokens", "lm_head"])
    path = tmp_path / "a" / "adapter_model.safetensors"
    base, own = load_file(folder / "model.safetensors"), load_file(path)
    for name in (EMBED, HEAD):
        own[f"base_model.model.{name}"] = np.concatenate([base[name], base[name][:3]])
    save_file(own, path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 99, "b": 0}, unk_token="b"))
    words.save(str(tmp_path / "a" / "tokenizer.json"))
    assert merge_command(monkeypatch, folder, tmp_path / "a", "--out", out) == 0
    model = load(str(out))
    assert model.network.config.vocab_size == 100
    assert model.tokenizer.token_to_id("a") == 99


def test_a_refused_merge_leaves_nothing(tmp_path, monkeypatch, capsys):
    folder, out = base_folder(tmp_path), tmp_path / "merged"
    trained(folder, tmp_path / "a", target_modules=["q_proj"])
    for arguments, message in (
        ([folder, tmp_path / "absent"], "no PEFT adapter"),
        ([folder, tmp_path / "a", "--combine", "sums"], "did you mean 'sum'?"),
        ([folder, tmp_path / "a", "--weight", "1", "--weight", "2"], "2 weights for 1 adapters"),
        ([folder, tmp_path / "a", "--dtype", "int8"], "--dtype"),
        ([tmp_path / "absent", tmp_path / "a"], "there is no model"),
    ):
        assert merge_command(monkeypatch, *arguments, "--out", out) == 2
        assert message in capsys.readouterr().err
        assert not out.exists()


def test_rotations_meet_other_weights_only_if_that_is_allowed(tmp_path):
    folder = base_folder(tmp_path)
    trained(folder, tmp_path / "a", target_modules=["q_proj"])
    base = open_model(str(folder)).identity
    other = open_model(Merge(str(folder), (str(tmp_path / "a"),))).identity
    file = tmp_path / "r.safetensors"
    about = {"model": str(folder), "digest": "of other files"}
    mark = {"fingerprint": asdict(base.fingerprint)}
    save_rotations(file, Transform(), {**about, **mark})
    load_rotations(file, identity=base)
    message = r"\.layers\.0\.self_attn\.q_proj\.weight differs, and so do 2 of the other 29 tensors"
    with pytest.raises(InputError, match=message + r"\)$"):
        load_rotations(file, identity=other)
    with pytest.raises(InputError, match=message + r"\); --allow-mismatch, or allow_mismatch"):
        load_rotations(file, identity=other, allow_mismatch=False)
    with pytest.warns(UserWarning, match=message):
        load_rotations(file, identity=other, allow_mismatch=True)
    save_rotations(file, Transform(), about)  # as qrot 0.2 did
    with pytest.raises(InputError, match="of other files is not"):
        load_rotations(file, identity=base)
    for damaged in ([], {"total": "x"}, {"total": "x", "tensors": {"a": 1}}):
        save_rotations(file, Transform(), {**about, "fingerprint": damaged})
        with pytest.raises(InputError, match=r"metadata\.fingerprint"):
            load_rotations(file, identity=base)
