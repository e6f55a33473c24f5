"""A benchmark's engine of two ranks: processes as a server starts them, which end with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmcore.config import make_config
from llmcore_devtools.bench import ranks
from llmcore_devtools.bench.engine_runs import BenchEngine
from llmcore_devtools.family import small_model
from llmcore_server.supervisor.child import Child


def test_an_engine_of_two_ranks_answers_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Child] = []

    class Noted(Child):
        def __init__(self, *given: object, **more: object) -> None:
            super().__init__(*given, **more)  # type: ignore[arg-type]
            started.append(self)

    monkeypatch.setattr(ranks, "Child", Noted)
    small_model("LlamaForCausalLM", num_attention_heads=4, num_key_value_heads=2, hidden_size=32).save_pretrained(
        tmp_path
    )
    config = make_config(
        model_dir=str(tmp_path), device="cpu", data_type="f32", tp=2, max_req_total_len=64, max_total_token_num=256
    )
    with BenchEngine(config) as engine:
        assert engine.run([(9, 4), (3, 2)]).output_tokens == 6
        assert [child.alive for child in started] == [True]
    assert [child.alive for child in started] == [False]
