"""`llmcore plan` on a small checkpoint, for this machine and for one that is not here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.api.specs import DeviceInfo
from llmcore.builtin.devices import cuda
from llmcore.cli import main
from llmcore.cli.plan import find_machine, parse_size, show_bytes
from llmcore.config import Config, make_config
from llmcore.registry.loader import build_registry, select
from llmcore_devtools import registry_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from llmcore_devtools.family import small_model

    path = tmp_path_factory.mktemp("model")
    small_model("LlamaForCausalLM").save_pretrained(path)
    return path


def plan(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any, str]:
    """Exit code, JSON and stderr of `llmcore plan ARGS --json`."""
    with pytest.raises(SystemExit) as end:
        main(["plan", *args, "--json"])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), json.loads(out) if out else None, err


def test_one_of_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has half of the KV heads and of every matrix, and the whole embedding."""
    from llmcore_devtools.family import small_model

    given = {"num_attention_heads": 4, "num_key_value_heads": 2}
    small_model("LlamaForCausalLM", **given).save_pretrained(tmp_path)
    (_, whole, _), (_, half, _) = (
        plan(capsys, str(tmp_path), "--device", "cpu", "--tp", ranks) for ranks in ("1", "2")
    )
    assert (whole["ranks"], half["ranks"]) == (1, 2)
    assert half["budget"]["kv_token"] * 2 == whole["budget"]["kv_token"]
    assert 0.5 < half["budget"]["weights"] / whole["budget"]["weights"] < 0.95


def test_a_model_of_70b_fits_on_two_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    configs = Path(__file__).resolve().parents[3] / "benchmarks" / "configs"
    machine = ("--load_format", "dummy", "--device", "sm90", "--memory", "139GiB", "--max_req_total_len", "8192")
    (_, whole, _), (_, half, _) = (
        plan(capsys, str(configs / "llama-3.1-70b"), *machine, "--tp", ranks) for ranks in ("1", "2")
    )
    assert not whole["budget"]["fits"] and 70.5e9 < whole["budget"]["parameters"] < 70.6e9
    assert half["budget"]["fits"] and half["budget"]["longest"] == 8192
    assert half["budget"]["buffers"] == 2 * 2 * (64 << 20), "two slots of 64 MiB, for elements of 2 and of 4 bytes"
    assert half["budget"]["pool"] < 0.9 * (139 << 30) - half["budget"]["weights"] - half["budget"]["buffers"]


def test_this_machine(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import safetensors

    code, found, _ = plan(capsys, str(model), "--device", "cpu", "--data_type", "bf16")
    with safetensors.safe_open(model / "model.safetensors", "np") as file:
        parameters = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118 - it is no dict
    assert code == 0
    assert found["budget"]["parameters"] == parameters
    assert found["budget"]["weights"] == parameters * 2
    assert found["budget"]["kv_token"] == 3 * 3 * (8 + 8) * 2
    assert found["budget"]["longest"] == found["max_position"] == 64


def test_from_a_config_alone(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    code, _, err = plan(capsys, str(tmp_path), "--device", "cpu")
    assert code == 2 and "--load_format dummy" in err
    _, whole, _ = plan(capsys, str(model), "--device", "cpu")
    code, found, _ = plan(capsys, str(tmp_path), "--device", "cpu", "--load_format", "dummy")
    assert code == 0
    for name in ("parameters", "weights", "kv_token", "longest"):
        assert found["budget"][name] == whole["budget"][name]


def test_experts_are_counted_as_they_are_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Drawn weights, held as one matrix for all experts, predict what a checkpoint of each expert predicts."""
    from llmcore_devtools.family import small_model

    theirs = small_model("MixtralForCausalLM", num_local_experts=40)
    theirs.save_pretrained(tmp_path)
    _, whole, _ = plan(capsys, str(tmp_path), "--device", "sm90", "--memory", "1GiB")
    _, drawn, _ = plan(capsys, str(tmp_path), "--device", "sm90", "--memory", "1GiB", "--load_format", "dummy")
    assert drawn["budget"] == whole["budget"]
    assert sum(whole["stored"].values()) == sum(drawn["stored"].values())
    assert whole["budget"]["parameters"] == sum(parameter.numel() for parameter in theirs.parameters())
    # two experts for a token, of 112 each
    assert whole["budget"]["activations"] == 8192 * (6 * 72 + 2 * (3 * 112 + 72)) * 4 + 131 * 8 * 1000


def test_a_machine_that_is_not_here(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _ = plan(capsys, "--model_dir", str(model), "--device", "sm90", "--memory", "80GiB")
    assert code == 0
    assert found["device"]["capability"] == 90
    assert found["budget"]["usable"] == int((80 << 30) * 0.9)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device", "sm61"], "say how much memory it has: --memory 80GiB"),
        (["--device", "sm9x"], "there is no device 'sm9x'"),
        (["--device", "cpu", "--memory", "80GiB"], "leave it out"),
        (["--memory", "much"], "'much' is no size"),
        (["--mode", "nope"], "--mode nope: there is no such mode"),
        (["--model_dir", "/elsewhere"], "MODEL is another model than --model_dir"),
    ],
)
def test_errors(model: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    code, _, err = plan(capsys, str(model), *args)
    assert code == 2
    assert message in err


def test_a_gpu_here_and_one_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    here = DeviceInfo("cuda", "Here", capability=90, memory=40 << 30)
    monkeypatch.setattr(cuda, "available", lambda: None)
    monkeypatch.setattr(cuda, "CUDA", lambda index: SimpleNamespace(info=here, measured=True, step_tokens=4096))
    registry = build_registry(Config(discovered=select(()).plugins))
    for name in ("auto", "sm90"):
        found = find_machine(registry, name, None)
        assert (found.info, found.memory, found.step_tokens) == (here, 40 << 30, 4096)
    with pytest.raises(ConfigError, match=r"sm61 is not here .*another compute capability.*--memory"):
        find_machine(registry, "sm61", None)
    other = find_machine(registry, "sm61", 8 << 30)
    assert (other.info.capability, other.memory) == (61, 8 << 30)


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 << 30), ("80G", 80 << 30), ("1.5 MB", 3 << 19), ("12", 12), ("1KiB", 1024)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_size_needs_a_number() -> None:
    with pytest.raises(ConfigError, match="write 80GiB"):
        parse_size("GiB")
    assert [show_bytes(size) for size in (12, 1536, 3 << 20, 5 << 30)] == [
        "12 bytes",
        "1.5 KiB",
        "3.0 MiB",
        "5.00 GiB",
    ]


@pytest.mark.parametrize("held", [False, True])
def test_a_head_beside_a_tied_embedding_is_counted(
    held: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Headers do not say whether the two are equal."""
    from llmcore_devtools.family import small_model
    from safetensors.torch import load_file, save_file

    small_model("LlamaForCausalLM", tie_word_embeddings=True).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.embed_tokens.weight"]
    if held:
        save_file({**tensors, "lm_head.weight": table.clone()}, file)
    _, found, _ = plan(capsys, str(tmp_path), "--device", "cpu")
    parameters = sum(tensor.numel() for tensor in tensors.values())
    assert found["budget"]["parameters"] == parameters + held * table.numel()
    assert found["doubled"] == ["lm_head.weight"] * held
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path), "--device", "cpu"])
    assert ("with lm_head.weight (less if it is equal to the embedding)" in capsys.readouterr().out) == held


def test_quantized_weights_say_their_bits(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a method that would hold all linears in int8, from a config alone."""
    example = Path(__file__).parents[3] / "docs" / "examples" / "int8" / "int8_linears.py"
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "int8_linears"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = [str(tmp_path), "--device", "cpu", "--load_format", "dummy", "--plugins", str(example), "llama"]
    _, found, _ = plan(capsys, *args)
    bits = found["budget"]["bits_per_weight"]
    assert bits == 8 * found["budget"]["weights"] / found["budget"]["parameters"] and 8 < bits < 32
    with pytest.raises(SystemExit):
        main(["plan", *args])
    assert f", {bits:.2f} bits per weight through int8-linears" in capsys.readouterr().out


@pytest.mark.parametrize("modes", [(), ("triton_w4a16", "g32"), ("triton_w8a8",)], ids=["plain", "w4a16", "w8a8"])
def test_the_plan_predicts_the_bytes_that_are_loaded(
    modes: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within 2 %, with the bits that a weight takes."""
    from llmcore.engine.model import load_model, pick_device
    from llmcore_devtools.family import small_model

    more = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 128}
    small_model("LlamaForCausalLM", **more, tie_word_embeddings=False).save_pretrained(tmp_path)
    pinned = ("linear=torch",)  # whose weights stay parameters
    args = ["--device", "cpu", "--data_type", "bf16", "--kernel", *pinned]
    given = [*args, "--mode", *modes] if modes else args
    _, planned, _ = plan(capsys, str(tmp_path), *given)
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path), *given])
    text = capsys.readouterr().out
    registry = registry_of()
    settings = make_config(model_dir=str(tmp_path), device="cpu", data_type="bf16", mode=modes, kernel=pinned)
    loaded = load_model(settings, registry, pick_device(registry, "cpu"), lambda stage, done, total: None)
    tensors = list(loaded.model.parameters())
    held = sum(tensor.nbytes for tensor in tensors)
    assert abs(planned["budget"]["weights"] - held) <= 0.02 * held
    assert abs(loaded.weights.bytes - held) <= 0.02 * held
    bits = planned["budget"]["bits_per_weight"]
    assert abs(bits - 8 * held / planned["budget"]["parameters"]) <= 0.02 * bits
    assert modes == () or f"{bits:.2f} bits per weight through online_{modes[0].removeprefix('triton_')}" in text
