"""GGUF: a file written as llama.cpp writes them loads to the same decoder, and converts to the same checkpoint."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from treecore.errors import ConfigError
from treecore.model.batch import ForwardBatch
from treecore.model.decoder import Decoder
from treecore.model.gguf import convert_gguf, read_gguf
from treecore.model.gguf_file import LAYER_NAMES, TOP_NAMES, hf_name
from treecore.model.load import load_decoder
from treecore.model.sequence import SequenceCache
from treecore.testing.checkpoints import TINY, write_tiny_llama

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "1", "2", "Ġ", "Ġa"]
VOCAB = TOKENS + [f"<unused{idx}>" for idx in range(len(TOKENS), 61)]


def llama_cpp_order(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The permutation of llama.cpp's convert_hf_to_gguf.py."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, checkpoint: Path, **metadata: Any) -> Path:
    """A GGUF file of the tiny checkpoint, q and k rows in llama.cpp's order, norms in fp32."""
    writer = gguf.GGUFWriter(path, metadata.get("architecture", "llama"))
    writer.add_uint32("llama.context_length", 256)
    writer.add_uint32("llama.embedding_length", 32)
    writer.add_uint32("llama.block_count", 2)
    writer.add_uint32("llama.feed_forward_length", 48)
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_uint32("llama.attention.head_count_kv", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(metadata.get("pre", "smollm"))
    writer.add_token_list(VOCAB)
    writer.add_token_types([3, 3, 3] + [1] * (len(VOCAB) - 3))
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    names = {hf_name(path, name): name for name in gguf_names()}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        values = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = llama_cpp_order(values, 4 if "q_proj" in name else 2)
        writer.add_tensor(names[name], values if values.ndim == 1 else values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_names() -> list[str]:
    """All tensors of a two-layer model, as GGUF names them."""
    return [*TOP_NAMES, *(f"blk.{idx}.{name}.weight" for idx in range(2) for name in LAYER_NAMES)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hugging Face form, fp16."""
    return write_tiny_llama(tmp_path_factory.mktemp("hf"), dtype=torch.float16)


@pytest.fixture(scope="module")
def gguf_file(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF form of it."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", checkpoint)


def logits(decoder: Decoder) -> torch.Tensor:
    """Of a fixed prompt."""
    pool = decoder.new_pool(64)
    cache = SequenceCache(pool)
    cache.advance("a", 0, [1, 5, 9, 13, 60])
    return decoder.forward(ForwardBatch.from_segments([cache.next_segment("a")]), pool)


def test_a_gguf_file_loads_to_the_same_decoder(checkpoint: Path, gguf_file: Path) -> None:
    """Bit-equal logits: same weights, same order of rows."""
    assert torch.equal(
        logits(load_decoder(gguf_file, dtype="float32")), logits(load_decoder(checkpoint, dtype="float32"))
    )


def test_the_spec_is_that_of_the_checkpoint(gguf_file: Path) -> None:
    """From metadata alone."""
    spec, _ = read_gguf(gguf_file)
    assert (spec.name, spec.vocab_size, spec.num_layers, spec.head_dim, spec.tie_embeddings) == ("tiny", 61, 2, 8, True)
    assert spec.norm.eps == pytest.approx(TINY["rms_norm_eps"])
    assert spec.eos_token_ids == (2,)


def test_conversion_gives_the_same_checkpoint_and_the_same_bytes_each_time(
    checkpoint: Path, gguf_file: Path, tmp_path: Path
) -> None:
    """Equal tensors; two runs are equal byte for byte; progress ends at the total; no partial file remains."""
    progress: list[tuple[int, int]] = []
    convert_gguf(gguf_file, tmp_path / "one", lambda done, total: progress.append((done, total)))
    convert_gguf(gguf_file, tmp_path / "two")
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert sorted(files) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()}
    assert progress == [(done, 20) for done in range(1, 21)]
    expected, actual = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "one" / "model.safetensors")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_whoever_may_read_the_configuration_may_read_the_weights(gguf_file: Path, tmp_path: Path) -> None:
    """Containers run as another user than the one who converted."""
    convert_gguf(gguf_file, tmp_path / "out")
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1


def test_the_converted_tokenizer_splits_digits_and_knows_special_tokens(gguf_file: Path, tmp_path: Path) -> None:
    """Merges apply, digits stand alone, control tokens are one token and vanish from the text."""
    convert_gguf(gguf_file, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|>ab12 a<|im_end|>").ids
    assert [VOCAB[token_id] for token_id in ids] == ["<|im_start|>", "ab", "1", "2", "Ġa", "<|im_end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab12 a"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>"
    assert config["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("metadata", "named"), [({"architecture": "qwen2"}, "qwen2"), ({"pre": "llama-bpe"}, "llama-bpe")]
)
def test_what_is_not_supported_is_named_and_nothing_is_written(
    checkpoint: Path, tmp_path: Path, metadata: dict[str, str], named: str
) -> None:
    """Another architecture, another tokenizer."""
    path = write_gguf(tmp_path / "x.gguf", checkpoint, **metadata)
    with pytest.raises(ConfigError, match=named):
        convert_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("num_bytes", [0, 3, 200])
def test_a_file_cut_off_is_refused(gguf_file: Path, tmp_path: Path, num_bytes: int) -> None:
    """Empty, in the magic, in the metadata; a checkpoint that is no file at all too."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf_file.read_bytes()[:num_bytes])
    for broken in (path, tmp_path / "none.gguf"):
        with pytest.raises(ConfigError, match="not a readable GGUF"):
            load_decoder(broken, dtype="float32")


def test_a_tensor_without_a_name_of_ours_is_refused() -> None:
    """A bias, an expert: not this architecture."""
    with pytest.raises(ConfigError, match=r"blk.0.attn_q.bias"):
        hf_name(Path("x.gguf"), "blk.0.attn_q.bias")
