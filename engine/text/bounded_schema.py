"""JSON schemas whose numbers end: a small model may write digits until its tokens run out."""

from __future__ import annotations

from typing import Any

# The integers that every reader of JSON holds exactly.
MOST = 2**53 - 1
STEP = 1e-9  # of other numbers
ANY = "cflow-any"

_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
                "$comment", "$schema", "format"}  # fmt: skip
_OF_ONE = ("additionalProperties", "items", "additionalItems", "contains", "if", "then", "else")
_OF_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with bounds for the numbers that have none, also where any value is allowed.

    Numbers are written without an exponent, in steps of STEP."""
    values: list[dict[str, Any]] = [
        {"type": kind} for kind in ("null", "boolean", "string", "number", "array", "object")
    ]
    found: dict[str, Any] = _bounded(schema)
    defs = found.get("$defs", {})
    if not isinstance(defs, dict) or "$id" in schema:
        return schema
    return found | {"$defs": {**defs, ANY: {"anyOf": [_bounded(value) for value in values]}}}


def _bounded(schema: Any) -> Any:
    if schema is True or (isinstance(schema, dict) and schema.keys() <= _ANNOTATIONS):
        return {"$ref": f"#/$defs/{ANY}"}
    if not isinstance(schema, dict) or schema.keys() & {"enum", "const", "$ref"}:
        return schema
    new = dict(schema)
    for key in _OF_ONE:
        if isinstance(new.get(key), dict | bool):
            new[key] = _bounded(new[key])
    for key in _OF_LIST:
        if isinstance(new.get(key), list):
            new[key] = [_bounded(part) for part in new[key]]
    for key in _BY_NAME:
        if isinstance(new.get(key), dict):
            new[key] = {name: _bounded(part) for name, part in new[key].items()}
    kinds = new.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "object" in kinds:
        new.setdefault("additionalProperties", _bounded(True))
    if "array" in kinds:
        new.setdefault("items", _bounded(True))
    if "number" in kinds or "integer" in kinds:
        _bound(new)
        if "number" in kinds:
            new.setdefault("multipleOf", STEP)
    return new


def _bound(number: dict[str, Any]) -> None:
    """Add the bounds that are missing, unless the schema's own lie outside of them."""
    low = number.get("minimum", number.get("exclusiveMinimum"))
    high = number.get("maximum", number.get("exclusiveMaximum"))
    if low is None and not (isinstance(high, int | float) and high <= -MOST):
        number["minimum"] = -MOST
    if high is None and not (isinstance(low, int | float) and low >= MOST):
        number["maximum"] = MOST
