"""See that the engine works alone, and that a family brings the server: what is installed came from wheels."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from running import ended, fetched, run, serving

ABSENT = ("falcon", "waitress", "zmq", "prometheus_client", "llmcore_server", "llmcore_devtools")
"""What no command of the engine may need."""

LLM = """
import importlib.util, sys
from llmcore import LLM

found = [name for name in sys.argv[2].split(",") if importlib.util.find_spec(name)]
assert not found, f"{found} can be imported"
with LLM(sys.argv[1], device="cpu") as llm:
    (answer,) = llm.generate(["Once"], max_new_tokens=4, ignore_eos=True)
print(len(answer.token_ids))
"""

MISSING = {"serve": ("llmcore-server", "server"), "bench": ("llmcore-devtools", "devtools")}
"""Command -> the distribution that brings it, and the extra to install it by."""


def check_alone(bin_folder: Path, source: Path, scratch: Path) -> None:
    """`LLM` and `llmcore generate` answer, and other commands say what brings them. `source`: tests/third_party."""
    run(sys.executable, source / "make_model.py", scratch, "LlamaForCausalLM")
    llmcore = bin_folder / "llmcore"
    assert run(bin_folder / "python", "-c", LLM, scratch, ",".join(ABSENT)).strip() == "4"
    prompts = scratch / "prompts.txt"
    prompts.write_text("Once\nTwice\n")
    lines = run(llmcore, "generate", prompts, "--model_dir", scratch, "--max_new_tokens", "3").splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["Once", "Twice"], lines
    for command, (dist, extra) in MISSING.items():
        done = ended(llmcore, command, scratch)
        said = f"error: `llmcore {command}` comes with {dist}, which is not installed; "
        said += f'pip install "llmcore-engine[{extra}]"\n'
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said), done


def check_server(bin_folder: Path, source: Path, scratch: Path) -> None:
    """With `--plugins qwen` the server and the dialects take part, and `-tgi` leaves one out."""
    run(sys.executable, source / "make_model.py", scratch, "Qwen2ForCausalLM")
    llmcore = bin_folder / "llmcore"
    with serving(llmcore, scratch, scratch / "qwen.log", "--plugins", "qwen") as url:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        assert json.loads(fetched(f"{url}/v1/chat/completions", chat))["choices"]
        native = {"inputs": "Once", "parameters": {"max_new_tokens": 3}}
        assert json.loads(fetched(f"{url}/generate", native))["generated_text"]
        assert "llmcore_" in fetched(f"{url}/metrics")
    with serving(llmcore, scratch, scratch / "tgi.log", "--plugins", "qwen", "--use_tgi_api") as url:
        assert json.loads(fetched(f"{url}/generate", native))["generated_text"]
        assert json.loads(fetched(f"{url}/info"))["model_id"]
    without_tgi = ("--plugins", "qwen,-tgi")
    rows = json.loads(run(llmcore, "plugins", "--json", *without_tgi))
    states = {row["name"]: row["state"] for row in rows}
    assert states["tgi"] == "off" and states["lightllm"] == states["serve"] == "active", states
    done = ended(llmcore, "serve", scratch, *without_tgi, "--use_tgi_api")
    assert done.returncode == 2 and "--use_tgi_api" in done.stderr, done
