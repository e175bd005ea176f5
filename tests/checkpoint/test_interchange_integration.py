"""Checkpoints that travel: through a bucket and back, and to and from Hugging Face's own loader."""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest
import torch
from tests.checkpoint.samples import same, save, trained
from tests.storage.servers import moto_server

import serai
from serai.checkpoint.copying import copy
from serai.checkpoint.exporting import export
from serai.checkpoint.importing import import_checkpoint
from serai.checkpoint.retention import head, pin, prune


def test_a_copy_into_a_bucket_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDFORTESTS")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-the-tests")
    save(tmp_path / "here", trained(), 1, 2, 3)
    with moto_server() as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("PUT", "/bucket")
        assert connection.getresponse().status == 200
        connection.close()
        bucket = f"s3://bucket/run?endpoint=http://127.0.0.1:{port}&region=us-east-1"
        assert len(copy(tmp_path / "here", bucket, every=True).generations) == 3
        assert copy(tmp_path / "here", bucket, every=True).bytes == 0
        assert same(serai.load(bucket), serai.load(tmp_path / "here"))
        pin(bucket, step=1)
        assert [g.step for g in prune(bucket, serai.Keep(last=1), dry_run=False).removed] == [2]
        assert head(bucket).generation.step == 3
        export(bucket, tmp_path / "m.safetensors", keys=["model"])
        import_checkpoint(tmp_path / "m.safetensors", bucket, step=9)
        copy(bucket, tmp_path / "back", step=9)
    # Of tied weights the import knows both names, from the file's metadata.
    assert same(serai.load(tmp_path / "back")["model"], serai.load(tmp_path / "here")["model"])


def test_hugging_face_loads_an_export_and_its_folder_is_imported(tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: pip install 'serai[transformers]'"
    )
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=32)
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(0, 64, (2, 8))
    with torch.no_grad():
        expected = model(tokens).logits
    with serai.Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(1, {"model": model})
    report = export(tmp_path / "root", tmp_path / "hf", keys=["model"], max_shard_bytes=10_000)
    assert report.shared == {"lm_head.weight": "transformer.wte.weight"}
    config.save_pretrained(tmp_path / "hf")
    loaded, told = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    with torch.no_grad():
        assert same(loaded.eval()(tokens).logits, expected)

    loaded.save_pretrained(tmp_path / "theirs")  # leaves the tied head out
    import_checkpoint(tmp_path / "theirs", tmp_path / "again", step=4)
    other = transformers.GPT2LMHeadModel(config).eval()
    with serai.Checkpointer(tmp_path / "again") as checkpointer:
        assert checkpointer.restore({"model": other}) is not None
    with torch.no_grad():
        assert same(other(tokens).logits, expected)
