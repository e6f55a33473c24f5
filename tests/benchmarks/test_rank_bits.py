"""benchmarks/rank_bits.py on two processes of the CPU: a model with latent attention and experts has every column.

The CPU has a step in flight and graphs as far as a CPU can, so that steps have padding.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from llmcore_devtools.family import small_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
AHEAD = BENCHMARKS.parent / "tests" / "core" / "engine" / "ahead_device.py"
PLUGINS = (f"plugins={AHEAD}", "plugins=deepseek", "device=cpu-ahead")
SETTINGS = (*PLUGINS, "data_type=f32", "max_req_total_len=64", "max_total_token_num=512")


@pytest.fixture
def rank_bits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("rank_bits")


def test_two_ranks_have_the_same_bits(rank_bits: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_attention_heads": 4, "hidden_size": 32, "head_dim": 8, "num_hidden_layers": 2}
    small_model("DeepseekV3ForCausalLM", **sizes).save_pretrained(tmp_path)
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    few = ("--steps", "60", "--requests", "6", "--longest", "30")
    assert rank_bits.main(["--model", str(tmp_path), *few, *settings]) == 0
    said = capsys.readouterr().out
    assert " captured graphs" in said and " 0 captured graphs" not in said
    assert said.endswith("the ranks have the same bits\n")
    rows = {name: fields for name, *fields in map(str.split, said.splitlines()) if name in rank_bits.COLUMNS}
    assert rows.keys() == rank_bits.COLUMNS.keys()
    for steps, mismatches, first, *_ in rows.values():
        assert int(steps) >= 60 and (mismatches, first) == ("0", "-")


def test_the_mix_has_many_lengths_within_the_longest(rank_bits: Any) -> None:
    lengths = rank_bits.mix(48, 100)
    assert len(set(lengths)) > 40 and lengths == rank_bits.mix(48, 100)
    assert all(1 <= length <= 50 for pair in lengths for length in pair)


@pytest.mark.parametrize("steps", ["0", "32769"])
def test_steps_that_the_table_has_no_room_for(rank_bits: Any, steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rank_bits.main(["--steps", steps])
    assert "give 1 to 32,768" in capsys.readouterr().err
