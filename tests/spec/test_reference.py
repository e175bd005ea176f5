"""docs/job-file.md is what the models say, and what it shows works."""

from __future__ import annotations

import re
from pathlib import Path

from serai.spec import resolve
from serai.spec.fields import list_keys
from serai.spec.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "job-file.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "python -m serai.spec.reference > docs/job-file.md"
    )


def test_every_key_is_in_it() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for key in list_keys():
        assert f"| `{key.path.rpartition('.')[2]}` |" in text, key.path


def test_its_example_runs_through_the_reader(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "job.yaml").write_text(example)
    spec = resolve(tmp_path / "job.yaml", ["train.steps=100", "train.betas=[0.9, 0.99]"])
    assert spec.document.train is not None
    assert (spec.document.train.steps, spec.document.train.betas) == (100, (0.9, 0.99))
