"""Specs: token buckets, requirements, template marks, and values that a spec refuses."""

from __future__ import annotations

from typing import Any

import pytest
from llmcore.api.specs import (
    TOKEN_BUCKETS,
    OptionSpec,
    OutputParserSpec,
    Requires,
    TemplateMarks,
    bucket_of,
)
from llmcore.config import Config, make_config


@pytest.mark.parametrize("bucket", range(len(TOKEN_BUCKETS)))
def test_a_bucket_begins_and_ends_where_it_says(bucket: int) -> None:
    first, last = TOKEN_BUCKETS[bucket]
    assert bucket_of(first) == bucket and bucket_of(last or 10**9) == bucket
    assert bucket == 0 or bucket_of(first - 1) == bucket - 1, "no number of tokens is left out"


def test_sets_lists_and_tuples_may_say_what_a_kernel_requires() -> None:
    listed = Requires(dtypes=["f32"], layouts={"token"}, shape={"size": (64, 128)})  # type: ignore[arg-type]
    assert listed == Requires(
        dtypes=frozenset({"f32"}), layouts=frozenset({"token"}), shape={"size": frozenset({64, 128})}
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtypes": "f32"}, "dtypes is one string, 'f32'"),
        ({"layouts": "token"}, "layouts is one string"),
        ({"shape": {"size": "64"}}, "size is one string"),
    ],
)
def test_one_string_is_not_a_collection(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Requires(**given)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtypes: fp32 is none of f32, f16, bf16"):
        Requires(dtypes=frozenset({"f32", "fp32"}))


def test_marks_fit_a_template_that_has_all_texts_and_none_of_the_others() -> None:
    marks = TemplateMarks(texts=("<call>", "</call>"), without=("json",))
    assert marks.fit("<call>x</call>")
    assert not marks.fit("<call>") and not marks.fit("<call>json</call>")


@pytest.mark.parametrize("name", ["auto", "none"])
def test_words_of_the_parser_options_are_not_names(name: str) -> None:
    with pytest.raises(ValueError, match="gives that word a meaning of its own"):
        OutputParserSpec(name=name, kind="tool", make="m:m")


def test_options_of_several_values_are_tuples_everywhere() -> None:
    tags = OptionSpec(name="tags", multiple=True)
    assert make_config([tags]).plugin_options == {"tags": ()}
    assert make_config([tags], tags=["a", "b"]).plugin_options == {"tags": ("a", "b")}
    assert Config(plugin_options={"tags": ["a", "b"]}).plugin_options == {"tags": ("a", "b")}
