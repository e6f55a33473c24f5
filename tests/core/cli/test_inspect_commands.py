"""`llmcore plugins`, `hooks`, `models`, `kernels` and `modes`: what they print, and that they do it fast."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from llmcore import __version__
from llmcore.api.hookspecs import HOOKS
from llmcore.cli import root

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "docs" / "examples"


def run(*args: str) -> Result:
    return CliRunner().invoke(root, [*args])


def rows(*args: str) -> list[dict[str, Any]]:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def plugin(tmp_path: Path, code: str, name: str = "mine") -> str:
    path = tmp_path / f"{name}.py"
    path.write_text(f"from llmcore.api import *\nfrom llmcore.api import hookimpl\n{code}")
    return str(path)


def test_plugins_lists_built_ins_and_installed_ones() -> None:
    found = {row["name"]: row for row in rows("plugins")}
    assert found["llama"]["dist"] == "plugin-llama"
    assert found["llama"]["brings"] == {"model": ["llama", "llama_score"]}
    assert found["radix"]["dist"] == "llmcore-engine"
    assert all(row["state"] == "active" for row in found.values())
    assert f"plugin-llama {__version__}" in run("plugins").output


def test_plugins_shows_what_is_left_out_and_what_failed(tmp_path: Path) -> None:
    broken = plugin(tmp_path, "import module_that_is_absent", "broken")
    result = run("plugins", "--plugins", broken, "--plugins=-radix", "--json")
    found = {row["name"]: row for row in json.loads(result.stdout)}
    assert result.exit_code == 1, "a plugin that was named failed"
    assert (found["llama"]["state"], found["radix"]["state"], found["broken"]["state"]) == ("off", "off", "failed")
    assert "No module named 'module_that_is_absent'" in found["broken"]["notes"][0]
    assert "install 'module_that_is_absent', or leave it out" in found["broken"]["notes"][0]


def test_plugins_shows_declined_contributions(tmp_path: Path) -> None:
    code = "@hookimpl\ndef register_schedulers():\n    yield SchedulerSpec(name='s', make='m:m', api=99)\n"
    found = {row["name"]: row for row in rows("plugins", "--plugins", plugin(tmp_path, code))}
    assert found["mine"]["state"] == "active"
    assert "scheduler s: written for plugin interface 99" in found["mine"]["notes"][0]


def test_plugins_by_hook() -> None:
    names = {row["name"] for row in rows("plugins", "--hook", "register_models")}
    assert "llama" in names and "radix" not in names


def test_an_unknown_plugin_is_an_error_that_lists_what_exists() -> None:
    result = run("plugins", "--plugins", "lama")
    assert "there is no plugin 'lama'; installed: " in str(result.exception)
    assert "Did you mean llama" in str(result.exception)


def test_hooks_lists_every_hook_with_its_contract() -> None:
    found = {row["name"]: row for row in rows("hooks")}
    assert list(found) == list(HOOKS)
    assert all(row["called"] and row["returns"] and row["chosen_by"] for row in found.values())
    assert "llama" in found["register_models"]["plugins"]
    text = run("hooks", "build_layer").output
    assert "build_layer(layer: torch.nn.Module, info: LayerInfo)" in text and "Chosen by: every plugin" in text
    assert "Did you mean build_layer" in str(run("hooks", "build_layers").exception)


def test_models_lists_families() -> None:
    found = {row["name"]: row for row in rows("models")}
    assert found["llama"]["architectures"] == ["LlamaForCausalLM"]
    assert "LlamaForCausalLM" in run("models").output


def test_kernels_lists_every_op_with_its_reference() -> None:
    found = rows("kernels", "rms_norm")
    assert found[-1]["name"] == "torch" and found[-1]["priority"] == 0
    assert {row["op"] for row in rows("kernels")} > {"linear", "rms_norm"}
    assert "there is no op 'liner'" in str(run("kernels", "liner").exception)


def test_kernels_explain_for_a_device_that_is_not_here() -> None:
    code = str(EXAMPLES / "register_kernels.py")
    (here,) = rows("kernels", "rms_norm", "--explain", "--dtype", "fp32", "--plugins", code)
    assert (here["chosen"], here["plugin"], here["tokens"]) == ("written-out", "register_kernels", "any")
    assert here["others"]["torch"] == "priority 0 < 40"
    (there,) = rows("kernels", "rms_norm", "--explain", "--dtype", "fp32", "--plugins", code, "--device", "sm90")
    assert there["chosen"] == "torch"
    assert there["others"]["written-out"] == "needs device cpu, has cuda"
    assert "there is no device 'sm_x'" in str(run("kernels", "--explain", "--device", "sm_x").exception)


def test_kernels_explain_what_deterministic_leaves() -> None:
    model = str(ROOT / "benchmarks" / "configs" / "llama-3.1-8b")
    found = {row["op"]: row for row in rows("kernels", "--model", model, "--device", "sm90", "--deterministic")}
    assert all(row["chosen"] for row in found.values())
    assert found["attn.gqa.decode"]["chosen"] == found["attn.gqa.prefill"]["chosen"] != "torch"
    (linear,) = rows("kernels", "linear", "--explain", "--deterministic")
    assert linear["chosen"] is None and linear["why"].startswith("--deterministic: no kernel for linear on cpu")


def test_kernels_explain_says_why_a_pin_does_not_fit() -> None:
    code = str(EXAMPLES / "register_kernels.py")
    pin = ("--plugins", code, "--kernel", "rms_norm=written-out")
    (row,) = rows("kernels", "rms_norm", "--explain", "--dtype", "bf16", *pin)
    assert row["chosen"] is None
    assert "does not fit rms_norm on cpu, bf16" in row["why"] and "needs dtype f32, has bf16" in row["why"]


def test_kernels_explain_groups_token_counts_with_one_outcome(tmp_path: Path) -> None:
    code = "@hookimpl\ndef register_kernels():\n"
    code += "    yield KernelSpec(op='rms_norm', name='few', make='m:m', when=Requires(buckets=frozenset({0, 1})))\n"
    found = rows("kernels", "rms_norm", "--explain", "--plugins", plugin(tmp_path, code))
    assert {row["tokens"]: row["chosen"] for row in found} == {"1, 2-16": "few", "17-64, 65-256, 257+": "torch"}


def test_kernels_for_a_model_know_its_shapes(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = rows("kernels", "--model", str(tmp_path), "--device", "sm90")
    shapes = {(row["op"], row["shape"].get("inputs"), row["shape"].get("outputs")) for row in found}
    assert ("linear", 64, 192) in shapes and ("linear", 96, 64) in shapes
    (decode,) = [row for row in found if row["op"] == "attn.gqa.decode"]
    assert decode["shape"]["kv_heads"] == 2
    assert decode["others"]["sdpa"] == "needs device cpu, has cuda"


def test_modes_say_what_they_pin_and_what_does_not_fit(tmp_path: Path) -> None:
    code = "@hookimpl\ndef register_modes():\n    yield ModeSpec(name='int8kv', layout='token-int8')\n"
    code += "    yield ModeSpec(name='plain', kernels={'linear': 'torch'})\n"
    found = {row["name"]: row for row in rows("modes", "--plugins", plugin(tmp_path, code))}
    assert found["int8kv"]["misfit"] == "needs layout token-int8, which no plugin brings"
    assert found["plain"]["misfit"] is None and found["plain"]["kernels"] == {"linear": "torch"}
    text = run("modes", "--plugins", plugin(tmp_path, code)).output
    assert "no: needs layout token-int8" in text and "linear=torch" in text


@pytest.mark.parametrize("command", ["plugins", "hooks", "models", "modes", "kernels"])
def test_every_listing_pipes_plain_text(command: str) -> None:
    result = run(command)
    assert result.exit_code == 0
    assert "\x1b" not in result.output


def test_listing_plugins_imports_little() -> None:
    program = "import sys\nfrom llmcore.cli import main\ntry:\n    main(['plugins'])\nexcept SystemExit: pass\n"
    program += "heavy = {'torch', 'transformers', 'falcon', 'zmq', 'rich'} & set(sys.modules)\n"
    program += "print(heavy or 'light', file=sys.stderr)"
    started = time.monotonic()
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "light", f"after {time.monotonic() - started:.2f} s"
