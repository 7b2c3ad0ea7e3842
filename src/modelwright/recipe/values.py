"""Small values that recipes are written in: shares of a length, and frozen sections."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class Frozen(BaseModel):
    """A value that cannot change; the sentence under each field is its help and its reference."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )


class Steps:
    """A number of steps, or a share of all steps: ``500``, ``0.05`` or ``5%``."""

    WANTS = "a count such as 500, or a share such as 5%"

    def __init__(self, text: int | float | str) -> None:
        self.text = text
        share = isinstance(text, str) and text.strip().endswith("%")
        try:
            number = float(text.strip().rstrip("%")) / (100 if share else 1) if isinstance(text, str) else float(text)
        except ValueError:
            raise ValueError(f"it wants {self.WANTS}") from None
        is_share = share or 0 < number < 1
        if isinstance(text, bool) or number < 0 or (is_share and number > 1) or (not is_share and number % 1):
            raise ValueError(f"it wants {self.WANTS}")
        self.share: float | None = number if is_share else None
        self.count: int | None = None if is_share else int(number)

    def of(self, total: int) -> int:
        """Turn the value into a count, given how many there are in all; a share is at least one."""
        if self.share is not None:
            return max(1, round(self.share * total))
        assert self.count is not None
        return self.count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Steps) and (self.share, self.count) == (other.share, other.count)

    def __hash__(self) -> int:
        return hash((self.share, self.count))

    def __repr__(self) -> str:
        return f"Steps({self.text!r})"

    @classmethod
    def _parse(cls, value: object) -> Self:
        if isinstance(value, cls):
            return value
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                return cls(value)
            except ValueError:
                pass
        raise PydanticCustomError("steps", "it wants {wants}", {"wants": cls.WANTS})

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._parse,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value.text),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": r"^[0-9.]+%$"}]}


def _compiles(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise PydanticCustomError("regex", "it wants a regular expression: {reason}", {"reason": str(error)}) from None
    return text


COMPILES = AfterValidator(_compiles)
Regex = Annotated[str, COMPILES]
"""Text that is a regular expression."""
