"""Unpacking a GGUF file must give back the model that it was written from."""

from __future__ import annotations

import pytest
import tiny_gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gna_utils.errors import GnaError
from gna_utils.gguf_folder import convert


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    original = tiny_gguf.write(folder / "tiny.gguf")
    convert(folder / "tiny.gguf", folder / "model")
    return original, folder / "model"


def test_weights_come_back_in_their_own_order(unpacked):
    """Query and key rows are stored in another order (transformers issue 31766)."""
    original, folder = unpacked
    back = AutoModelForCausalLM.from_pretrained(folder)
    assert back.dtype == torch.float32
    expected, found = original.state_dict(), back.state_dict()
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        assert torch.equal(values, found[name]), name


def test_outputs_come_back(unpacked):
    original, folder = unpacked
    back = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        expected, found = original(ids).logits, back(ids).logits
    assert torch.equal(expected, found)


def test_configuration_comes_back(unpacked):
    original, folder = unpacked
    back = AutoModelForCausalLM.from_pretrained(folder).config
    for name in ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"):
        assert getattr(back, name) == getattr(original.config, name), name


def test_tokenizer_comes_back(unpacked):
    words = AutoTokenizer.from_pretrained(unpacked[1])
    assert words.tokenize("ab a12\n 3") == ["ab", "Ġa", "1", "2", "Ċ", "Ġ", "3"]
    assert words("<|im_start|>a<|im_end|>").input_ids == [1, 3, 2]
    assert (words.bos_token_id, words.eos_token_id, words.unk_token_id, words.pad_token_id) == (1, 2, 0, 2)


def test_a_file_of_another_kind_is_refused(tmp_path):
    tiny_gguf.write(tmp_path / "other.gguf", pre="llama-bpe")
    with pytest.raises(GnaError, match="only \\('llama', 'gpt2', 'smollm'\\) can be converted"):
        convert(tmp_path / "other.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()
