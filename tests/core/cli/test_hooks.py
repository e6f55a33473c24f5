"""`llmcore hooks`: every hook with its contract."""

from __future__ import annotations

from listed import rows, run
from llmcore.api.hookspecs import HOOKS


def test_hooks_lists_every_hook_with_its_contract() -> None:
    found = {row["name"]: row for row in rows("hooks")}
    assert list(found) == list(HOOKS)
    assert all(row["called"] and row["returns"] and row["chosen_by"] for row in found.values())
    assert "llama" in found["register_models"]["plugins"]
    text = run("hooks", "build_layer").output
    assert "build_layer(layer: torch.nn.Module, info: LayerInfo)" in text and "Chosen by: every plugin" in text
    assert "Did you mean build_layer" in str(run("hooks", "build_layers").exception)
