"""Writes ``docs/job-file.md`` from the models: ``python -m serai.spec.reference > docs/job-file.md``."""

from __future__ import annotations

from importlib.resources import files

from serai.spec.document import LATER_SECTIONS
from serai.spec.fields import SpecKey, list_keys
from serai.train.config import PRESETS

__all__ = ["reference"]

_HEAD = """\
# The job file

One YAML file describes a job. `serai init NAME` writes one to start from, `serai explain KEY` tells about a key on
the command line, `serai explain --schema` prints the JSON Schema for editors. This page is generated from the
models that read the file (`python -m serai.spec.reference > docs/job-file.md`), and a test compares the two.

```yaml
{example}```

## Rules

- **Strict.** A key that serai does not know is an error, with the nearest name; so is a value of the wrong kind.
  Every problem is reported at once, at its line and column. Sections of later versions are refused, because a key that
  does nothing would be a promise that is not kept: {later}.
- **YAML 1.2 scalars.** `3e-4` is a number. `yes`, `no`, `on` and `off` are text; write `true` or `false`. A key that
  takes text takes it as written, so `name: 007` is the text `007`. Quoted numbers are text.
- **`extends: base.yaml`** lays this file over another one (which may extend a third). Mappings merge key by key,
  lists are replaced, `null` takes an inherited value back.
- **`--set KEY=VALUE`** overrides a value: `--set train.steps=100 --set 'train.betas=[0.9, 0.99]'`. It is typed by the
  spec: a key that takes text takes everything behind the `=`.
- **Precedence**: defaults < `extends` < job file < `--set`. `serai run job.yaml --show-config` prints every value and
  where it came from.
- **Paths** start from the folder of the file that holds them, those of `--set` from the current folder. Storage URLs
  (`s3://...`) stay as they are.
- **Two kinds of job**: serai's own loop (`model`, `data`, `train`, and `parallel`), or a `script` of yours with
  `args`. A script saves by itself through `serai.Checkpointer()`, so of `checkpoint` it takes only `root`.
- **One name, one run.** Running a name again resumes it. What shapes the loss curve must stay as it was; `checkpoint`,
  `retry`, `parallel`, `resources` and how often the loop reports may change, and so may `micro_batch`,
  `grad_accumulation` and `processes` as long as the rows of one step stay the same.
"""


def reference() -> str:
    """The whole page."""
    example = (
        (files("serai.spec") / "templates" / "job.yaml").read_text(encoding="utf-8").replace("NAME", "demo")
    )
    later = ", ".join(f"`{section}`" for section in LATER_SECTIONS)
    parts = [_HEAD.format(example=example, later=later), "## Keys\n"]
    parts.append(_table([key for key in list_keys() if "." not in key.path]))
    parts += [
        f"\n### {key.path}\n\n{key.description}\n\n{_table(inner)}"
        for key in list_keys()
        if key.section
        and (inner := [other for other in list_keys() if other.path.rpartition(".")[0] == key.path])
    ]
    parts.append(_presets())
    return "\n".join(parts)


def _table(keys: list[SpecKey]) -> str:
    rows = ["| key | takes | default | what it does |", "|---|---|---|---|"]
    for key in keys:
        default = "**required**" if key.required else f"`{key.default}`" if key.default is not None else ""
        name = key.path.rpartition(".")[2]
        rows.append(f"| `{name}` | {key.kind} | {default} | {key.description} |")
    return "\n".join(rows) + "\n"


def _presets() -> str:
    rows = [
        "\n## Presets\n",
        "Parameters are counted with a vocabulary of 32,000 and without any override.\n",
        "| preset | layers | hidden | heads | kv_heads | ffn | rope_theta | tie_embeddings | parameters |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, shape in PRESETS.items():
        millions = shape.parameters(32_000) / 1e6
        size = f"{millions / 1e3:.2f} B" if millions >= 1000 else f"{millions:.1f} M"
        rows.append(
            f"| `{name}` | {shape.layers} | {shape.hidden} | {shape.heads} | {shape.kv_heads} | {shape.ffn} | "
            f"{shape.rope_theta:.0f} | {str(shape.tie_embeddings).lower()} | {size} |"
        )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
