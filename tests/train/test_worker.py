"""Errors of a worker: what is shown, and the cause class that the supervisor acts on."""

from __future__ import annotations

import errno

import pytest
import torch
from torch.distributed import DistBackendError

from serai.errors import CheckpointCorrupt, SaveFailed, SpecError, StorageFull, TrainingError
from serai.train.worker import explain


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1234"


@pytest.mark.parametrize(
    ("error", "cause", "code"),
    [
        (TrainingError("nan", code="S601"), "not_a_number", "S601"),
        (TrainingError("nan", code="S602"), "not_a_number", "S602"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory", "S603"),
        (MemoryError(), "out_of_memory", "S603"),
        (RuntimeError(GLOO), "collective", "S605"),
        (DistBackendError("NCCL watchdog"), "collective", "S605"),
        (_caused(SaveFailed("the ranks did not agree"), RuntimeError(GLOO)), "collective", "S605"),
        (StorageFull("no space"), "disk_full", "S303"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full", None),
        (SpecError("wrong", code="S101"), "spec_error", "S101"),
        (CheckpointCorrupt("bytes differ"), "checkpoint", "S402"),
        (TrainingError("other data", code="S610"), "user_error", "S610"),
        (ValueError("a mistake"), "user_error", None),
    ],
)
def test_each_error_has_its_cause(error: Exception, cause: str, code: str | None) -> None:
    shown, named = explain(error)
    assert named == cause
    assert getattr(shown, "code", None) == code
    assert code is not None or shown is error


def test_a_real_allocation_failure_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    shown, cause = explain(caught.value)
    assert cause == "out_of_memory"
    assert "train.micro_batch" in str(shown)
