"""What Acme's developers run: pip install -e '.[test]' && pytest"""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from acme_serving.scheduler import ShortestPrompt
from llmcore.api.sched import WaitingRequest
from llmcore_devtools import check_plugin, registry_of
from llmcore_devtools.family import assert_family_matches_transformers, small_model
from llmcore_devtools.loaded_model import LoadedModel

ALONE = registry_of("acme")


def test_what_it_brings_keeps_the_contracts():
    checked = check_plugin(ALONE, "acme")
    assert checked["register_kernels"] == 1, "the one for a GPU did not run"
    assert set(checked.values()) == {1}


@pytest.mark.parametrize("config", [{"use_parallel_residual": False}, {"attention_bias": False, "rotary_pct": 0.5}])
def test_the_family_gives_the_tokens_that_transformers_gives(config):
    assert_family_matches_transformers("GPTNeoXForCausalLM", registry=ALONE, **config)


def test_the_kernel_is_what_runs_where_it_is_pinned():
    with tempfile.TemporaryDirectory() as folder:
        small_model("GPTNeoXForCausalLM").save_pretrained(folder)
        ours = LoadedModel(Path(folder), registry=ALONE, kernels={"attn.gqa.decode": "acme"}, granule=4)
        theirs = LoadedModel(Path(folder), registry=ALONE, kernels={"attn.gqa.decode": "torch"}, granule=4)
    kernels = {type(kernel).__module__ for kernel in ours.model.attention_kernels["all"].decode}
    assert kernels == {"acme_serving.attention"}
    assert ours.generate(range(20), 8).tokens == theirs.generate(range(20), 8).tokens


def test_short_prompts_overtake_long_ones():
    queue = [
        WaitingRequest(i, tokens, 0, 8, 1, waited) for i, (tokens, waited) in enumerate([(90, 3), (7, 2), (9, 1)])
    ]
    view = SimpleNamespace(
        **{
            "budget": 20,
            "prompt_budget": 20,
            "chunk": 16,
            "whole": False,
            "admit": True,
            "fits": lambda candidate: True,
        },
        **{"running": np.array([4, 5, 6]), "remaining": np.array([1, 12, 4]), "waiting": lambda: iter(queue)},
    )
    decision = ShortestPrompt(None).plan(view)
    assert dict(zip(decision.rows.tolist(), decision.n_query.tolist(), strict=True)) == {4: 1, 5: 12, 6: 4}
    assert decision.admit == [(1, 3)]
