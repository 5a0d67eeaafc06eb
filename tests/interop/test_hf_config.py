# SPDX-License-Identifier: Apache-2.0
"""Config and tokenizer beside converted weights: what is copied, what the config says; transformers reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from bytecheckpoint import LoadSpec, save_state_dict
from bytecheckpoint.cli.app import bcp
from bytecheckpoint.convert import convert
from bytecheckpoint.convert.hf_config import FILE_NAMES
from bytecheckpoint.errors import ConfigError

WEIGHTS = {"w": torch.ones(100, 3), "norm": torch.ones(7)}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(bcp, [*map(str, arguments)])


def make_config(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


def make_checkpoint(folder: Path, weights: dict[str, torch.Tensor] | None = None) -> Path:
    save_state_dict(folder, {"model": WEIGHTS if weights is None else weights, "step": 3}, no_dist=True)
    return folder


def config_of(tmp_path: Path, weights: dict[str, torch.Tensor], **config: Any) -> tuple[dict[str, Any], str]:
    """Returns the config beside these weights, and the notes."""
    from_ = make_config(tmp_path / "from", **config)
    ckpt = make_checkpoint(tmp_path / "ckpt", weights)
    report = convert(ckpt, tmp_path / "hf", spec=LoadSpec(include="model"), hf_config=from_)
    return json.loads((tmp_path / "hf/config.json").read_text()), "\n".join(report.notes)


@pytest.mark.parametrize("shard_size", ["5GB", "1KB"])
@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_copied(tmp_path: Path, shard_size: str, workers: int) -> None:
    from_ = make_config(tmp_path / "from", torch_dtype="float32")
    for name in ("tokenizer.json", "merges.txt", "generation_config.json", "chat_template.jinja"):
        (from_ / name).write_bytes(b"\xff" + name.encode())
    for name in ("model.safetensors", "pytorch_model.bin", "modeling.py", "README.md", "model.safetensors.index.json"):
        (from_ / name).write_text("not to be copied")
    ckpt = make_checkpoint(tmp_path / "ckpt")
    options = ("--dtype", "bf16", "--shard-size", shard_size, "--workers", workers)
    done = run("convert", ckpt, tmp_path / "hf", "--model-only", "--hf-config", from_, *options)
    assert done.exit_code == 0, done.output
    copied = {path.name for path in (tmp_path / "hf").iterdir() if path.name in FILE_NAMES}
    assert copied == {"config.json", "tokenizer.json", "merges.txt", "generation_config.json", "chat_template.jinja"}
    others = {path.name for path in (tmp_path / "hf").iterdir()} - copied
    assert all(name.startswith("model") for name in others)
    assert (tmp_path / "hf/merges.txt").read_bytes() == b"\xffmerges.txt"
    assert "with config.json, tokenizer.json, merges.txt, " in done.output
    assert "note:" not in done.output
    assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_dtype_of_the_config(tmp_path: Path) -> None:
    weights = {"w": torch.ones(9, 9, dtype=torch.bfloat16), "n": torch.ones(4), "ids": torch.arange(500)}
    inner = {"dtype": "float32", "width": 3}
    config, notes = config_of(tmp_path, weights, dtype="float32", text_config=inner, other={"dtype": "float32"})
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"
    assert config["other"] == {"dtype": "float32"}
    assert "torch_dtype" not in config
    assert "config.json says bfloat16, which most elements have (81; 4 of float32)" in notes
    assert "no tokenizer" in notes


def test_a_config_without_a_dtype_gets_one(tmp_path: Path) -> None:
    config, notes = config_of(tmp_path, {"w": torch.ones(3, dtype=torch.float16)}, auto_map={"AutoModel": "code.Model"})
    assert config["torch_dtype"] == "float16"
    assert "code of the model's own" in notes


def test_quantized_weights_keep_what_the_config_says(tmp_path: Path) -> None:
    weights = {"w": torch.ones(9, 9).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(1, 1)}
    quantization = {"quant_method": "fp8", "dtype": "float8"}
    config, _ = config_of(tmp_path, weights, torch_dtype="bfloat16", quantization_config=quantization)
    assert (config["torch_dtype"], config["quantization_config"]) == ("bfloat16", quantization)


def test_weights_that_are_not_quantized_lose_the_quantization(tmp_path: Path) -> None:
    config, notes = config_of(tmp_path, WEIGHTS, torch_dtype="bfloat16", quantization_config={"quant_method": "fp8"})
    assert config == {"model_type": "llama", "torch_dtype": "float32"}
    assert "quantization_config was left out" in notes


def test_without_the_option_it_says_what_is_missing(tmp_path: Path) -> None:
    ckpt = make_checkpoint(tmp_path / "ckpt")
    for name, *options in (("convert", "--include", "model"), ("model", "--model-only")):
        done = run("convert", ckpt, tmp_path / name, *options)
        assert done.exit_code == 0
        assert "from_pretrained also needs config.json, and a tokenizer" in done.output
        assert "--hf-config DIR" in done.output
        assert not (tmp_path / name / "config.json").exists()
    make_config(tmp_path / "from")
    (tmp_path / "convert/model.safetensors").rename(tmp_path / "from/model.safetensors")
    done = run("convert", tmp_path / "from", tmp_path / "again")
    assert f"--hf-config {tmp_path / 'from'}" in done.output
    assert "note:" not in run("convert", ckpt, tmp_path / "ours", "--to", "bcp").output


def test_what_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    ckpt = make_checkpoint(tmp_path / "ckpt")
    spec = LoadSpec(include="model")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "tokenizer.json").write_text("{}")
    broken = make_config(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    a_list = make_config(tmp_path / "list")
    (a_list / "config.json").write_text("[]")
    fifo = make_config(tmp_path / "fifo")
    os.mkfifo(fifo / "tokenizer.json")
    large = make_config(tmp_path / "large")
    with (large / "vocab.txt").open("wb") as file:
        file.truncate((128 << 20) + 1)
    before = sorted(tmp_path.iterdir())
    for folder, why in (
        (empty, r"there is no config\.json"),
        (tmp_path / "absent", r"there is no config\.json"),
        (broken, r"config\.json: Expecting"),
        (a_list, "no JSON object"),
        (fifo, "tokenizer.json"),
        (large, "more than 134217728 bytes"),
    ):
        for dry_run in (True, False):
            with pytest.raises(ConfigError, match=why):
                convert(ckpt, tmp_path / "hf", spec=spec, hf_config=folder, dry_run=dry_run)
    with pytest.raises(ConfigError, match="only for safetensors"):
        convert(ckpt, tmp_path / "hf", to="bcp", hf_config=make_config(tmp_path / "good"))
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "good"])


def test_links_as_in_the_cache_of_hugging_face(tmp_path: Path) -> None:
    make_config(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/config.json").symlink_to("../blobs/config.json")
    spec = LoadSpec(include="model")
    convert(make_checkpoint(tmp_path / "ckpt"), tmp_path / "hf", spec=spec, hf_config=tmp_path / "snapshot")
    assert not (tmp_path / "hf/config.json").is_symlink()


def test_a_resumed_conversion_takes_the_config_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bytecheckpoint.convert import local_destination

    first = make_config(tmp_path / "first", number=1)
    (first / "tokenizer.json").write_text("{}")
    second = make_config(tmp_path / "second", number=2)
    ckpt, spec = make_checkpoint(tmp_path / "ckpt"), LoadSpec(include="model")

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(local_destination, "_publish", fails)
        with pytest.raises(KeyboardInterrupt):
            convert(ckpt, tmp_path / "hf", spec=spec, hf_config=first)
    report = convert(ckpt, tmp_path / "hf", spec=spec, hf_config=second, resume=True)
    assert report.num_resumed == 1
    assert json.loads((tmp_path / "hf/config.json").read_text())["number"] == 2
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"config.json", "model.safetensors"}


def test_transformers_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: FOLDERS ARE NOT READ")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=99, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(tmp_path / "from")
    transformers.GenerationConfig(max_new_tokens=5).save_pretrained(tmp_path / "from")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=_tokenizer())
    tokenizer.save_pretrained(tmp_path / "from")
    state = {"model": model.state_dict(), "optimizer": {"step": 3}}
    save_state_dict(tmp_path / "ckpt", state, no_dist=True)
    options = ("--hf-config", tmp_path / "from", "--dtype", "bfloat16", "--shard-size", "50KB")
    done = run("convert", tmp_path / "ckpt", tmp_path / "hf", "--model-only", *options)
    assert (done.exit_code, "note:" in done.output) == (0, False), done.output
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == torch.bfloat16
    assert loaded.generation_config.max_new_tokens == 5
    wanted = model.state_dict()
    assert loaded.state_dict().keys() == wanted.keys()
    assert all(value.equal(wanted[name].bfloat16()) for name, value in loaded.state_dict().items())
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")("b a").input_ids == [1, 0]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer
