"""`llmcore bench`: every command runs, and its figures are what they say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from llmcore.cli import main
from llmcore_devtools import write_fake_model
from llmcore_devtools.bench.workloads import chat
from llmcore_devtools.server import FAKE_ENGINE, RunningServer, serving
from llmcore_devtools.tokenizer import write_tokenizer

ROOT = Path(__file__).resolve().parents[3]
TINY = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300},
    **{"max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32"},
    **{"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False},
}


def bench(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `llmcore bench ARGS`."""
    with pytest.raises(SystemExit) as end:
        main(["bench", *args])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds only a config.json."""
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Echoes prompts; its ids end at 999."""
    model = write_tokenizer(tmp_path_factory.mktemp("models") / "echo")
    with serving(model, engine_module=FAKE_ENGINE) as running:
        yield running


def test_latency_from_a_config_alone(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    sizes = ("--batch", "1", "--batch", "3", "--batch", "500", "--input-len", "8", "--output_len", "5")
    code, out, err = bench(
        capsys,
        *("latency", str(tiny), "--load_format", "dummy", "--max_total_token_num", "2k", "--repeats", "2"),
        *(*sizes, "--json", str(file)),
    )
    assert code == 0, err
    assert "decode step, ms" in out and "since the process began" in out and "measured: weights" in out
    found = json.loads(file.read_text())
    assert found["settings"]["disable_dynamic_prompt_cache"] is True
    assert found["settings"]["load_format"] == "dummy"
    assert 0 < found["start"]["ready_s"] < found["start"]["since_process_start_s"]
    assert found["machine"]["cores"] >= 1 and found["versions"]["torch"]
    one, three, skipped = found["results"]
    assert skipped["batch"] == 500 and "tokens of KV are needed, there are 2,000" in skipped["skipped"]
    for batch, result in ((1, one), (3, three)):
        whole, single = result["runs"], result["runs_of_one_token"]
        assert len(whole) == len(single) == 2
        steps = [(w["seconds"] - s["seconds"]) / 4 * 1e3 for w, s in zip(whole, single, strict=True)]
        assert result["decode_step_ms"]["median"] == pytest.approx(sum(steps) / 2)
        for run in whole:
            assert (run["prompt_tokens"], run["output_tokens"], run["steps"]) == (8 * batch, 5 * batch, 5)
            assert len(run["first"]) == batch and 0 < run["first"][-1] < run["seconds"]
        assert all(run["output_tokens"] == batch for run in single)


def test_throughput_counts_every_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = write_fake_model(tmp_path / "fake"), tmp_path / "out.json"
    code, out, err = bench(
        capsys,
        *("throughput", str(model), "--workload", "chat:2", "--workload", "fixed:3,7,4", "--repeats", "1"),
        *("--max_total_token_num", "4k", "--json", str(file), "--warmup", "0"),
    )
    assert code == 0, err
    assert "preemptions" in out
    mix, same = json.loads(file.read_text())["results"]
    (run,) = same["runs"]
    assert (run["requests"], run["prompt_tokens"], run["output_tokens"]) == (3, 21, 12)
    assert same["tokens_per_s"] == pytest.approx(33 / run["seconds"])
    assert same["output_tokens_per_s"] == pytest.approx(12 / run["seconds"])
    assert mix["runs"][0]["output_tokens"] == sum(output for _, output in chat(2).lengths)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("throughput", "--workload", "chat:x"), "write chat:N, or fixed:N,PROMPT,ANSWER"),
        (("throughput", "--workload", "fixed:1,2"), "write chat:N"),
        (("throughput", "--workload", "fixed:1,0,2"), "write chat:N"),
        (("latency",), "No model is given"),
        (("latency", "--json", "/none/x.json"), "there is no such directory"),
        (("latncy",), "There is no command 'latncy'. Did you mean latency?"),
        (("serve", "--url", "localhost"), "write http://HOST:PORT"),
        (("serve", "--url", "http://localhost:none"), "write http://HOST:PORT"),
        (("serve", "--url", "http://[::1"), "write http://HOST:PORT"),
        (("serve", "--url", "http://127.0.0.1:9", "--request_rate", "0"), "'0' is no rate"),
        (("serve", "--url", "http://127.0.0.1:9", "--slo", "x=1", "--model", "m"), "ttft, tpot, gap or e2e"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = bench(capsys, *args)
    assert code == 2
    assert message in " ".join(err.replace("\u2502", " ").split())


def test_a_prefix_is_found_only_where_the_cache_is_on(tmp_path: Path) -> None:
    from llmcore.config import make_config
    from llmcore_devtools.bench.engine_runs import BenchEngine

    config = make_config(model_dir=str(write_fake_model(tmp_path)), max_total_token_num=512)
    for on in (False, True):
        with BenchEngine(config, prefix_cache=on) as engine:
            request = engine.request(64, 2)
            for _ in range(2):
                engine.engine.submit(request)
                while not engine.engine.idle:
                    engine.engine.step()
            assert (engine.engine.load().cached_tokens > 0) == on


def test_the_gpu_script_runs_where_there_is_no_gpu(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    script = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--model", str(tiny), "--shrink", "128"]
    rows = ["--rows", "decode_256", "throughput", "start_cold"]
    more = [
        "--set",
        "max_total_token_num=4k",
        "--set",
        "max_req_total_len=256",
        "--repeats",
        "1",
        "--set",
        "device=cpu",
    ]
    done = subprocess.run([*script, *rows, *more, "--json", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "512 x (1,024 in, 128 out)" in done.stdout.splitlines()[-2]
    found = json.loads(file.read_text())["rows"]
    assert set(found) == {"decode_256", "throughput", "start_cold"}
    assert found["throughput"]["median"] > 0 and found["start_cold"]["median"] > 0


WITHOUT_TORCH = "import sys\nfor name in ('torch', 'transformers', 'triton'): sys.modules[name] = None\n"


def test_rates_from_a_process_without_torch(server: RunningServer, tmp_path: Path) -> None:
    json_file = tmp_path / "out.json"
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt,output\n12,4\n30,8\n")
    program = f"{WITHOUT_TORCH}from llmcore.cli import main; main(['bench', 'serve', *sys.argv[1:]])"
    given = ["--url", server.url, "--lengths", str(lengths), "--num-requests", "10", "--vocab_size", "250"]
    more = ["--request_rate", "100", "--request_rate", "inf", "--slo", "ttft=5000", "--slo", "tpot=5000"]
    more += ["--json", str(json_file)]
    done = subprocess.run([sys.executable, "-c", program, *given, *more], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "goodput at ttft 5000 ms, tpot 5000 ms" in done.stdout and "of a core" in done.stdout
    found = json.loads(json_file.read_text())
    assert [result["request_rate"] for result in found["results"]] == [100.0, "inf"]
    for result, answers in zip(found["results"], found["answers"], strict=True):
        assert result["answered"] == len(answers) == 10 and result["failed"] == 0
        assert result["goodput"]["share"] == 1.0
        assert 0 < result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"] <= result["e2e_ms"]["p99"]
        assert all(one["arrivals"][-1][1] == one["output"] for one in answers)


def test_a_refused_request_ends_the_benchmark(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = bench(capsys, "serve", "--url", server.url, "--workload", "fixed:2,4,4")
    assert code == 1 and "the first request failed: 400" in err and "not in the vocabulary" in err


def test_what_takes_too_long_is_given_up(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--workload", "fixed:3,4,900", "--vocab_size", "250", "--max_seconds", "0.3")
    code, out, _ = bench(capsys, "serve", "--url", server.url, *args)
    assert code == 0 and re.search(r"\b0 of 3 in [0-9.]+ s", out) and "3 were given up" in out
