"""Names of data types: those of `--data_type`, and those in a checkpoint's config."""

from __future__ import annotations

import pytest
from llmcore.api.errors import ConfigError
from llmcore.api.models import DATA_TYPES, data_type, read_dtype


def test_data_types() -> None:
    assert {name: data_type(name) for name in ("f16", "fp16", "bfloat16", "fp32")} == {
        "f16": "f16",
        "fp16": "f16",
        "bfloat16": "bf16",
        "fp32": "f32",
    }
    assert len(DATA_TYPES) == 8 and list(DATA_TYPES)[:3] == ["bf16", "f16", "f32"]
    with pytest.raises(ConfigError, match="use one of bf16, f16, f32"):
        data_type("int8")


@pytest.mark.parametrize(
    ("hf", "dtype"),
    [({"dtype": "bfloat16"}, "bf16"), ({"torch_dtype": "float16"}, "f16"), ({}, "f32"), ({"dtype": None}, "f32")],
)
def test_read_dtype(hf: dict[str, str], dtype: str) -> None:
    assert read_dtype(hf) == dtype
