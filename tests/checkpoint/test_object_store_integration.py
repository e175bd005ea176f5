"""The whole engine over a bucket: an agent of its own, a real S3 server, and a network that fails."""

from __future__ import annotations

import http.client
import os
from collections.abc import Iterator

import pytest
import torch
from tests.storage.servers import FaultyProxy, moto_server

import serai
from serai.errors import SeraiError


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A bucket behind a proxy that can fail; the keys are in the environment, as the agent needs them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDFORTESTS")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-the-tests")
    with moto_server() as port, FaultyProxy(port) as proxy:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("PUT", "/bucket")
        assert connection.getresponse().status == 200
        connection.close()
        yield proxy


def training(seed: int) -> tuple[torch.nn.Module, dict[str, object]]:
    """A model after one step of AdamW, and its state: about 19 MB, more than one part of an upload."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(800, 2000)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 800)).sum().backward()
    optimizer.step()
    return model, {"model": model, "optimizer": optimizer, "rng": serai.RNG()}


def test_saves_reach_a_bucket_through_a_failing_network(bucket: FaultyProxy) -> None:
    root = f"s3://bucket/run one?endpoint={bucket.endpoint}&region=us-east-1"
    model, state = training(seed=1)
    ckpt = serai.Checkpointer(root, keep=serai.Keep(last=2))
    try:
        assert ckpt.restore(state) is None
        for step in (1, 2, 3):
            bucket.plan("503", "lost", method="PUT")
            with torch.no_grad():
                model.weight.fill_(step)
            ckpt.save(step, state, metrics={"loss": 1 / step}).wait(tier="durable", timeout=120)
            assert bucket.left == 0
    finally:
        ckpt.close(timeout=120)

    # Read from the bucket alone, in the shape that was saved; retention kept two.
    assert torch.equal(serai.load(root)["model"]["weight"], torch.full((2000, 800), 3.0))
    assert torch.equal(serai.load(root, step=2)["model"]["weight"], torch.full((2000, 800), 2.0))
    report = serai.verify(root)
    assert [entry.step for entry in report.generations] == [3, 2]
    assert report.ok
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    assert secret not in repr(report)


def test_a_bucket_that_does_not_exist_is_named_at_once(bucket: FaultyProxy) -> None:
    with pytest.raises(SeraiError, match="there is no bucket 'no-such-bucket'") as caught:
        serai.Checkpointer(f"s3://no-such-bucket/run?endpoint={bucket.endpoint}&region=us-east-1")
    assert caught.value.code == "S309"
