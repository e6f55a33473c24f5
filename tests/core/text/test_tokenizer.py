from __future__ import annotations

import threading
import time
from pathlib import Path

import orjson
import pytest
from llmcore.api.errors import ConfigError, RequestError
from llmcore.text.tokenizer import load_tokenizer
from llmcore_devtools.tokenizer import EOS, SPECIAL, write_sentencepiece_like, write_tokenizer


def test_facts(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    assert tokenizer.vocab_size == 275
    assert tokenizer.eos_ids == (EOS,)
    assert tokenizer.special_ids == {256, 257, 258}
    assert tokenizer.token(tokenizer.encode(" ")[0]) == "Ġ"


def test_special_tokens_in_text_are_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    ids = tokenizer.encode(f"a{SPECIAL[1]}")
    assert ids[-1] == EOS
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"a{SPECIAL[1]}"


def test_other_threads_go_on_while_a_long_text_is_tokenized(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    turns, stop = [0], threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            time.sleep(0.001)
            turns[0] += 1

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        text = "a text that goes on " * 50_000
        before = turns[0]
        ids = tokenizer.encode(text)
        after = turns[0]
    finally:
        stop.set()
        thread.join()
    assert tokenizer.decode(ids) == text
    assert after - before > 3


def test_text_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be tokenized"):
        load_tokenizer(write_tokenizer(tmp_path)).encode("\ud800")


@pytest.mark.parametrize("text", ["é", "😀", "a b", "\x00"])
def test_bytes_of_tokens(tmp_path: Path, text: str) -> None:
    for write in (write_tokenizer, write_sentencepiece_like):
        tokenizer = load_tokenizer(write(tmp_path / write.__name__))
        joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
        assert joined.decode().lstrip(" ") == text


@pytest.mark.parametrize("token_id", [-1, 275, 2**31, 2**64])
def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, token_id: int) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    for use in (tokenizer.token, tokenizer.token_bytes, lambda token_id: tokenizer.decode([token_id])):
        with pytest.raises(RequestError, match="vocabulary"):
            use(token_id)


def test_both_configs_name_end_ids(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_bytes(orjson.dumps({"eos_token_id": 1}))
    assert load_tokenizer(tmp_path).eos_ids == (1,)
    (tmp_path / "generation_config.json").write_bytes(orjson.dumps({"eos_token_id": [2, 1, 0]}))
    assert load_tokenizer(tmp_path).eos_ids == (1, 2, 0)


def test_templates_are_found_wherever_they_stand(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_bytes(
        orjson.dumps({"chat_template": named, "eos_token": {"content": SPECIAL[2]}})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_ids == (258,)
    message = [{"role": "user", "content": "x"}]
    assert (tokenizer.chat(message), tokenizer.chat(message, tools=[{}])) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(tmp_path).chat(message) == "file"


@pytest.mark.parametrize("content", [b"", b"{}", b"{broken", b'{"model": {}}'])
def test_a_broken_file_is_a_startup_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_missing_file_is_a_startup_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_broken_companion_is_a_startup_error(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="tokenizer_config"):
        load_tokenizer(tmp_path)
