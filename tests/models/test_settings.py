"""Settings of methods, models and data sets are checked in one way, with one wording."""

import inspect
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from protofed.errors import UserError
from protofed.settings import SettingInfo, checked, in_words, keyword_settings, settings_below


def example(
    _: int,
    *,
    rate: Annotated[float, Field(gt=0, le=1, description="of learning")] = 0.1,
    kind: Annotated[Literal["a", "b"], "one of two"] = "a",
    on: bool | None = None,
    size: int,
) -> None:
    """Keyword-only arguments are settings."""


SETTINGS = keyword_settings(example, "the example")


def test_keyword_arguments_are_settings() -> None:
    shown = {name: (info.values, info.default, info.description) for name, info in SETTINGS.items()}
    assert shown == {
        "rate": ("a number > 0 and <= 1", 0.1, "of learning"),
        "kind": ("a|b", "a", "one of two"),
        "on": ("on|off", None, ""),
        "size": ("a whole number", inspect.Parameter.empty, ""),
    }


def test_text_becomes_a_value_of_its_type() -> None:
    given = {"rate": " 0.5 ", "kind": "b", "on": "off", "size": 3}
    assert checked(SETTINGS, given, "the example") == {"rate": 0.5, "kind": "b", "on": False, "size": 3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rate": "0"}, "x.rate=0 is not valid; it takes a number > 0 and <= 1"),
        ({"kind": "c"}, "x.kind=c is not valid; it takes a|b"),
        ({"sise": 1}, "unknown setting of the example: 'sise'; did you mean size?"),
    ],
)
def test_errors_say_what_is_wrong_and_what_it_takes(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        checked(SETTINGS, given, "the example", "x.")
    assert str(error.value) == message


def test_nothing_to_set() -> None:
    assert checked({}, {}, "this") == {}
    with pytest.raises(UserError, match="x: this has no settings; omit it"):
        checked({}, {"x": 1}, "this")
    with pytest.raises(UserError, match="setting 'untyped' of this needs a type annotation"):
        keyword_settings(lambda *, untyped=1: untyped, "this")


def test_words_and_prefixes() -> None:
    assert in_words(int | str | None) == "a whole number or a text"
    assert SettingInfo.of("a", int).values == "a whole number"
    assert settings_below("data", {"data.a": 1, "a": 2, "model.a": 3}) == {"a": 1}
    assert settings_below("", {"data.a": 1, "a": 2}) == {"a": 2}
