"""What a model directory and the settings make of each other before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from llmcore.api.errors import ConfigError
from llmcore.config import resolve_model
from llmcore.engine.llm import LLM
from llmcore.engine.model import describe_sampling, sampling_defaults
from llmcore_devtools import fake_answer, write_fake_model
from llmcore_devtools.family import small_model
from llmcore_devtools.tokenizer import write_tokenizer
from safetensors.torch import load_file, save_file


def test_an_eos_id_that_the_model_cannot_produce(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ConfigError, match=r"--eos_id 275 .* end at 274"):
        make_llm(eos_id=[3, 275])
    assert make_llm(eos_id=[3, 274]).facts.eos_ids == (3, 274)


def test_eos_ids_of_the_checkpoint_outside_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    directory = write_fake_model(tmp_path / "model")
    (directory / "generation_config.json").write_text('{"eos_token_id": [275, 9999, 256]}')
    with LLM(directory, device="cpu", max_total_token_num=5000) as llm:
        assert llm.facts.eos_ids == (257, 256)
        assert llm.generate([[1, 2]], temperature=0.0)[0].token_ids == fake_answer([1, 2], 16)


def test_without_eos_ids_of_its_own_a_model_ends_where_its_tokenizer_says(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    facts = msgspec.structs.replace(llm.facts, eos_ids=())
    assert facts.end_ids(llm.tokenizer.eos_ids) == llm.tokenizer.eos_ids != ()
    assert msgspec.structs.replace(facts, vocab_size=9).end_ids(llm.tokenizer.eos_ids) == ()


def test_settings_of_a_server_have_no_effect_in_process(make_llm: Callable[..., LLM]) -> None:
    for name in ("port", "httpserver_workers", "server-port"):
        with pytest.raises(ConfigError, match=f"{name} is a setting of the server"):
            make_llm(**{name: 1})


def test_a_directory_by_a_relative_path_has_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_fake_model(tmp_path / "model")
    (tmp_path / "link").symlink_to(directory)
    monkeypatch.chdir(directory)
    for path, name in ((".", "model"), ("../link", "link"), (f"{directory}/", "model")):
        assert resolve_model(path) == tmp_path / name


def test_the_summary_counts_parameters_and_not_what_kernels_make_of_them(tmp_path: Path) -> None:
    reference = small_model("LlamaForCausalLM", vocab_size=30_000, tie_word_embeddings=False)
    reference.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with LLM(tmp_path, device="cpu", max_total_token_num=100, max_req_total_len=64) as llm:
        (_, text), *_ = llm.facts.report
    millions = sum(parameter.numel() for parameter in reference.parameters()) / 1e6
    assert millions > 1 and f"{millions:,.1f} M parameters" in text


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_that_the_files_hold_beside_a_tied_embedding(
    equal: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted if it takes memory, and said once if it differs."""
    small_model("LlamaForCausalLM", vocab_size=30_000, tie_word_embeddings=True).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": table.clone() if equal else -table}, tmp_path / "model.safetensors")
    with LLM(tmp_path, device="cpu", max_total_token_num=100, max_req_total_len=64) as llm:
        report = dict(llm.facts.report)
    held = [*tensors.values()] + ([] if equal else [table])
    assert f"{sum(tensor.numel() for tensor in held) / 1e6:,.1f} M parameters" in report["model"]
    assert report["measured"].startswith(f"weights {sum(tensor.nbytes for tensor in held) / 2**20:,.0f} MiB")
    assert sum("differ in the checkpoint" in text for text in caplog.messages) == (not equal)


@pytest.mark.parametrize("name", ["kv_manager", "scheduler", "length_estimator"])
def test_a_policy_that_does_not_exist_is_named_before_anything_is_loaded(tmp_path: Path, name: str) -> None:
    directory = write_fake_model(tmp_path / "model")
    (directory / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match=f"there is no {name.replace('_', ' ')} 'nope'"):
        LLM(directory, **{name: "nope"})


OWN = {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": [1, 2]}


def test_the_models_own() -> None:
    assert sampling_defaults("auto", OWN) == OWN
    text = "temperature 0.6, top_k 20 (the model's generation_config.json); the rest as each API says"
    assert describe_sampling("auto", OWN) == text


def test_without_sampling_the_filters_mean_nothing(tmp_path: Path) -> None:
    greedy = {**OWN, "do_sample": False, "repetition_penalty": 1.1}
    left = {"temperature": 0.0, "repetition_penalty": 1.1, "do_sample": False, "eos_token_id": [1, 2]}
    assert sampling_defaults("auto", greedy) == left
    assert describe_sampling("auto", left).startswith("temperature 0, repetition_penalty 1.1 (the model's")
    (tmp_path / "g.json").write_text('{"do_sample": false, "top_p": 0.5}')
    assert sampling_defaults(str(tmp_path / "g.json"), OWN) == {"do_sample": False, "temperature": 0.0}


def test_none_keeps_what_ends_an_answer() -> None:
    assert sampling_defaults("none", OWN) == {"eos_token_id": [1, 2]}
    assert describe_sampling("none", {"eos_token_id": [1, 2]}).startswith("as each API says")


@pytest.mark.parametrize("name", ["", "generation_config.json"])
def test_another_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 1}')
    choice = str(tmp_path / name)
    assert sampling_defaults(choice, OWN) == {"temperature": 1}
    assert describe_sampling(choice, {"temperature": 1}) == f"temperature 1 ({choice}); the rest as each API says"


def test_nothing_is_said_plainly() -> None:
    assert describe_sampling("auto", {}) == "as each API says; the model's generation_config.json sets nothing"


@pytest.mark.parametrize("text", [None, "[]", "{"])
def test_a_file_that_is_none(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"--generation_config .*give auto, none, or"):
        sampling_defaults(str(path), OWN)
