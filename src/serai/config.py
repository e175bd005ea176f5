"""The base of every configuration model: strict for what a person writes, lenient for what a machine stored.

A room's config stands in ``<room>/config.py`` beside the class that reads it; ``serai.spec`` composes
them into the job file. Config modules import nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

__all__ = ["RULE_ERROR", "BrokenRule", "Config"]

RULE_ERROR = "serai_rule"
"""The pydantic error type that carries a list of ``BrokenRule`` in its context."""


@dataclass(frozen=True)
class BrokenRule:
    """A rule over several fields that does not hold.

    Attributes:
        key: the field to point at, dotted and relative to the config that owns the rule.
        message: what was true, one sentence.
        expected: what would have been right.
        next_step: the exact thing to type or do next.
        code: stable identifier that ``serai explain`` knows.
    """

    key: str
    message: str
    expected: str
    next_step: str | None = None
    code: str = "S114"


class Config(BaseModel):
    """A frozen, strict model: unknown keys and silent conversions (``"3"`` to ``3``) are errors."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )

    def broken_rules(self) -> Iterator[BrokenRule]:
        """Every rule over several fields that does not hold; none by default."""
        return iter(())

    @model_validator(mode="after")
    def _hold_rules(self) -> Self:
        broken = list(self.broken_rules())
        if broken:
            text = "; ".join(rule.message for rule in broken)
            raise PydanticCustomError(RULE_ERROR, "{text}", {"text": text, "broken": broken})
        return self

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> Self:
        """Reads what another version of serai may have stored: unknown keys are left out.

        Raises ``pydantic.ValidationError`` for every other problem.
        """
        document = _copy(stored)
        while True:
            try:
                return cls.model_validate(document)
            except ValidationError as error:
                unknown = [
                    problem["loc"] for problem in error.errors() if problem["type"] == "extra_forbidden"
                ]
                if not any(_remove(document, location) for location in unknown):
                    raise


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(entry) for entry in value]
    return value


def _remove(document: Any, location: tuple[int | str, ...]) -> bool:
    """Removes one entry; ``False`` when the location names a branch of a union and not a place."""
    *parents, last = location
    for part in parents:
        try:
            document = document[part]
        except (KeyError, IndexError, TypeError):
            return False
    if isinstance(document, dict) and last in document:
        del document[last]
        return True
    return False
