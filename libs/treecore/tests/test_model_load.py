"""Loading: what is accepted, and that every fault is one ConfigError that names the culprit."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from treecore.errors import ConfigError
from treecore.model.families import parse_spec, read_spec
from treecore.model.load import load_decoder, resolve_model
from treecore.model.spec import LayerSpec, LinearScaling, Llama3Scaling, RopeSpec
from treecore.testing.checkpoints import TINY, write_tiny_draft, write_tiny_llama

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def rewrite(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replaces, adds or (None) removes tensors of the checkpoint."""
    tensors: dict[str, Any] = {**load_file(path / "model.safetensors"), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / "model.safetensors")


def assert_refused(path: Path, *words: str, **options: Any) -> None:
    """Loading fails with one line that has all `words`."""
    with pytest.raises(ConfigError) as error:
        load_decoder(path, dtype="float32", **options)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mamba"),
        ("model_type", ["llama"]),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("quantization_config", {"bits": 4}),
        ("hidden_size", None),
        ("hidden_size", "32"),
        ("hidden_size", -1),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 10**9),
        ("max_position_embeddings", 10**12),
        ("intermediate_size", 10**30),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", 10**400),
        ("rope_theta", "big"),
        ("rope_scaling", "linear"),
        ("eos_token_id", "2"),
        ("eos_token_id", True),
        ("eos_token_id", 10**30),
        ("espalier", {"teacher_embeding": True}),
        ("espalier", True),
    ],
)
def test_an_unsupported_or_malformed_field_is_named(field: str, value: object) -> None:
    """One for each rule of the configuration."""
    with pytest.raises(ConfigError, match=field.removesuffix("_scaling")):
        parse_spec({**TINY, field: value}, "tiny")


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope"])
def test_other_rope_scalings_are_refused_by_name(kind: str) -> None:
    """They would decode to garbage if ignored."""
    with pytest.raises(ConfigError, match=kind):
        parse_spec({**TINY, "rope_scaling": {"type": kind, "factor": 2.0}}, "tiny")


def test_both_spellings_of_rope_are_read() -> None:
    """`rope_theta` with `rope_scaling`, and the `rope_parameters` of transformers 5."""
    old = parse_spec({**TINY, "rope_theta": 5e5, "rope_scaling": LLAMA3}, "tiny")
    new = parse_spec({**TINY, "rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, "tiny")
    assert old.layers == new.layers == (LayerSpec(RopeSpec(5e5, Llama3Scaling(8.0, 1.0, 4.0, 32))),) * 2
    linear = parse_spec({**TINY, "rope_scaling": {"type": "linear", "factor": 2}}, "tiny")
    assert linear.layers[0] == LayerSpec(RopeSpec(10000.0, LinearScaling(2.0)))


def test_llama3_scaling_needs_an_ordered_band() -> None:
    """Low at or above high would divide by zero."""
    with pytest.raises(ConfigError, match="low_freq_factor"):
        parse_spec({**TINY, "rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "tiny")


def test_generation_config_overrides_the_end_tokens(tmp_path: Path) -> None:
    """As in transformers; an instruct model often ends at several tokens."""
    path = write_tiny_llama(tmp_path / "tiny")
    assert read_spec(path).eos_token_ids == (2,)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    spec = read_spec(path)
    assert spec.eos_token_ids == (2, 7)
    assert spec.bos_token_id == 1
    assert spec.name == "tiny"


@pytest.mark.parametrize(
    "text", [None, "{", "[]", "\xff", "[" * 100_000], ids=["absent", "cut", "list", "utf8", "deep"]
)
def test_a_config_that_is_no_json_object(tmp_path: Path, text: str | None) -> None:
    """Absent, cut off, a list, not UTF-8, beyond any stack."""
    path = write_tiny_llama(tmp_path)
    (path / "config.json").unlink()
    if text is not None:
        (path / "config.json").write_text(text, encoding="latin-1")
    assert_refused(path, "config.json")


def test_a_missing_an_extra_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    """Each in turn."""
    path = write_tiny_llama(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(path / "model.safetensors")[name]
    rewrite(path, {name: None})
    assert_refused(path, name, "missing")
    rewrite(path, {name: weight.T.contiguous()})
    assert_refused(path, name, "(32, 48)", "(48, 32)")
    rewrite(path, {name: weight, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
    assert_refused(path, "q_proj.bias", "not part")


def test_redundant_tensors_of_old_exporters_are_ignored(tmp_path: Path) -> None:
    """Rotary frequencies, and the head of a tied model."""
    path = write_tiny_llama(tmp_path)
    rewrite(
        path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4), "lm_head.weight": torch.zeros(61, 32)}
    )
    load_decoder(path, dtype="float32")


@pytest.mark.parametrize("num_bytes", [0, 4, 100, -1])
def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path, num_bytes: int) -> None:
    """Empty, in the length, in the header, in the data."""
    path = write_tiny_llama(tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert_refused(path, "model.safetensors")


def test_pickled_weights_are_never_loaded(tmp_path: Path) -> None:
    """A directory with only a .bin file has no checkpoint."""
    path = write_tiny_llama(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert_refused(path, "model.safetensors", "no such file")


def shard(path: Path) -> dict[str, str]:
    """Splits the checkpoint in two files; returns the weight map."""
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    for idx, part in enumerate([names[::2], names[1::2]]):
        save_file({name: tensors[name] for name in part}, path / f"part-{idx}.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {name: f"part-{names.index(name) % 2}.safetensors" for name in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_shards_load_as_one(tmp_path: Path) -> None:
    """By the index; a shard that is not there is named."""
    path = write_tiny_llama(tmp_path)
    shard(path)
    assert load_decoder(path, dtype="float32").spec.num_layers == 2
    (path / "part-1.safetensors").unlink()
    assert_refused(path, "part-1.safetensors")


@pytest.mark.parametrize("weight_map", [None, {}, {"model.norm.weight": "../part-0.safetensors"}])
def test_a_bad_index_is_refused(tmp_path: Path, weight_map: object) -> None:
    """No map, an empty one, and one that leads out of the directory."""
    path = write_tiny_llama(tmp_path)
    shard(path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_refused(path, "index.json")


def test_a_draft_needs_its_teacher(tmp_path: Path) -> None:
    """Absent, or of another shape."""
    draft = write_tiny_draft(tmp_path / "draft", token_ids=[1, 2])
    assert_refused(draft, "teacher")
    other = write_tiny_llama(tmp_path / "other", vocab_size=60)
    assert_refused(draft, "teacher", "(60, 32)", embedding_from=other)


@pytest.mark.parametrize("token_ids", [[], [-1], [61]])
def test_head_token_ids_are_checked(tmp_path: Path, token_ids: list[int]) -> None:
    """They index the teacher's head."""
    draft = write_tiny_draft(tmp_path / "draft", token_ids=token_ids)
    assert_refused(draft, "head_token_ids", embedding_from=write_tiny_llama(tmp_path / "teacher"))


def test_local_paths_resolve_to_themselves(tmp_path: Path) -> None:
    """A directory, and a .gguf file."""
    gguf = tmp_path / "x.gguf"
    gguf.touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(gguf)) == gguf


@pytest.mark.parametrize("name", ["", "nothing", "./no/such/dir", "a/b/c", "/no/such", "../x/y"])
def test_what_is_neither_path_nor_hub_name_is_refused_without_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is not asked for it."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ConfigError, match="neither"):
        resolve_model(name)


def test_hub_names_download_safetensors_and_json_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a failure is one line."""
    asked = {}

    def download(name: str, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/model") == tmp_path
    assert asked == {"owner/model": ["*.safetensors", "*.json", "*.jinja"]}

    def fail(*args: object, **options: object) -> str:
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError) as error:
        resolve_model("owner/model")
    assert "no route" in str(error.value)
    assert "\n" not in str(error.value)
