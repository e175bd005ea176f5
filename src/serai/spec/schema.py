"""The JSON Schema of the job file, from the same models that read it."""

from __future__ import annotations

from typing import Any

from serai.spec.document import JobSpec

__all__ = ["job_schema"]


def job_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a job file as it may be written, ``extends`` included.

    A file that extends another may leave out what the other one holds. Rules over several keys
    (heads that divide the hidden width, say) are beyond a schema; ``serai run --dry-run`` checks them.
    """
    schema = JobSpec.model_json_schema()
    properties = schema["properties"]
    properties["extends"] = {
        "type": "string",
        "minLength": 1,
        "description": "A job file that this one is laid over, relative to this one.",
    }
    properties["args"]["items"] = {"type": ["string", "number", "boolean"]}
    for key, value in properties.items():
        if "$ref" in value:
            reference = {name: part for name, part in value.items() if name != "$ref"}
            properties[key] = {"anyOf": [{"$ref": value["$ref"]}, {"type": "null"}], **reference}
    schema.pop("required", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "serai job file, version 1",
        "anyOf": [
            {"required": ["extends"]},
            {
                "required": ["serai", "name", "script"],
                "properties": dict.fromkeys(("model", "data", "train", "parallel"), False),
            },
            {
                "required": ["serai", "name", "model", "data", "train"],
                "properties": {"script": False, "args": False},
            },
        ],
    }
