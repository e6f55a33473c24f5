"""Conformance of what a plugin adds around the model: files, front ends, settings. No torch at import."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmcore import specs
from llmcore.bridge import Load
from llmcore.config import settings
from llmcore.protocols import Checkpoint, Device, RequestRecord, Tokenizer
from llmcore.registry import Registry
from llmcore.resolve import REFERENCE
from llmcore.tallies import ServerFigures
from llmcore.testing.conformance import contributed, loaded
from llmcore.text.detokenizer import detokenizer

TEXTS = ("", "hello", "Hello, world! 123", "  two  spaces\n\ttab", "naïve café", "日本語と русский", "👩‍👩‍👧 emoji")
"""Texts that any tokenizer must survive."""

RECORD = RequestRecord(
    request_id="conformance-1",
    dialect="conformance",
    prompt_tokens=3,
    cached_tokens=2,
    output_tokens=1,
    max_new_tokens=16,
    finish="stop",
    first_token=0.1,
    duration=0.2,
)


def check_register_modes(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """What every mode pins exists."""
    modes = contributed(registry, plugin, specs.ModeSpec)
    kernels = {(spec.op, spec.name) for spec, _ in registry.specs(specs.KernelSpec)}
    for mode in modes:
        assert mode.layout or mode.kernels or mode.quant, f"mode {mode.name} pins nothing"
        if mode.layout is not None:
            registry.find(specs.KVLayoutSpec, mode.layout)
        for op, kernel in mode.kernels.items():
            registry.find(specs.OpSpec, op)
            assert kernel == REFERENCE or (op, kernel) in kernels, f"mode {mode.name}: {op} has no kernel {kernel}"
    return len(modes)


def check_register_devices(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Every device that is available here keeps `protocols.Device`; the others say why they are not."""
    devices = contributed(registry, plugin, specs.DeviceSpec)
    for spec in devices:
        reason = loaded(spec.available, f"available of {spec.name}")()
        assert reason is None or isinstance(reason, str), f"{spec.name}: available() returns a reason or None"
        if spec.named is not None:
            assert loaded(spec.named, "named")("no such device") is None, f"{spec.name} claims every name"
        if reason is None:
            _check_device(spec)
    return len(devices)


_OF_GRAPHS = frozenset({"capture", "forget_graphs", "graph_memory"})
"""What a device needs only where it has graphs."""


def _members(protocol: type) -> list[str]:
    """Attributes and methods of a protocol, by name."""
    names = (*protocol.__annotations__, *vars(protocol))
    return sorted({name for name in names if not name.startswith("_")})


def _check_device(spec: specs.DeviceSpec) -> None:
    import torch

    device = loaded(spec.make, f"make of {spec.name}")()
    wanted = [name for name in _members(Device) if name not in _OF_GRAPHS or getattr(device, "graphs", True)]
    lacks = [name for name in wanted if not hasattr(device, name)]
    assert not lacks, f"{spec.name} lacks {', '.join(lacks)} of protocols.Device"
    assert device.torch_device.type == device.info.type, f"{spec.name}: info.type is not the torch device's"
    assert device.ahead >= 0 and device.free_memory() > 0, f"{spec.name}: ahead or free_memory() is negative"
    device.reset_peak()
    there = device.pinned(torch.arange(5)).to(device.torch_device)
    event = device.event()
    event.wait()
    assert event.done(), f"{spec.name}: an event that was waited for is not done"
    device.synchronize()
    assert there.cpu().tolist() == [0, 1, 2, 3, 4], f"{spec.name}: data did not survive the way through pinned()"
    assert device.peak_memory() >= 0
    if device.graphs:
        _check_graphs(spec, device, there)


def _check_graphs(spec: specs.DeviceSpec, device: Device, numbers: Any) -> None:
    numbers + 1
    graph, result = device.capture(lambda: numbers + 1)
    for _ in range(2):
        numbers += 1
        graph.replay()
        device.synchronize()
        assert result.cpu().tolist() == (numbers + 1).cpu().tolist(), f"{spec.name}: a replay did not do the work anew"
    assert device.graph_memory >= 0
    device.forget_graphs()


def check_register_commands(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Every command is one of click's, under the name it was registered with, and has help."""
    import click
    from click.testing import CliRunner

    from llmcore.cli import COMMANDS

    commands = contributed(registry, plugin, specs.CommandSpec)
    for spec in commands:
        assert spec.name not in COMMANDS, f"core has a command {spec.name}"
        command = loaded(spec.command, f"command {spec.name}")
        assert isinstance(command, click.Command), f"command {spec.name} is a {type(command).__name__}"
        result = CliRunner().invoke(command, ["--help"])
        assert result.exit_code == 0, f"`llmcore {spec.name} --help` fails: {result.output}"
        assert command.help or spec.summary, f"command {spec.name} does not say what it does"
    return len(commands)


def check_register_options(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Every option has a usable name, a line of help, and a default of its own type."""
    options = contributed(registry, plugin, specs.OptionSpec)
    taken = {name for setting in settings() for name in (setting.name, *setting.aliases)}
    for option in options:
        assert option.name.isidentifier(), f"option {option.name!r} is no name; use letters, digits and _"
        assert option.name not in taken, f"core has an option {option.name}"
        assert option.summary, f"option {option.name} has no summary, its line of help"
        given = option.default if option.multiple else (option.default,)
        for value in given or ():
            if value is not None:
                assert isinstance(value, option.type), f"{option.name}: {value!r} is no {option.type.__name__}"
                assert not option.choices or value in option.choices, f"{option.name}: {value!r} is no choice"
    return len(options)


def check_register_metric_sinks(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Every sink takes records and snapshots, unknown figures and absent times included."""
    sinks = contributed(registry, plugin, specs.MetricSinkSpec)
    for spec in sinks:
        sink = loaded(spec.make, f"make of {spec.name}")()
        sink.request_finished(RECORD)
        sink.request_finished(_unanswered())
        sink.snapshot({**Load(running=1, cache={"nodes": 2}).figures(), "a_figure_nobody_knows": 3.0})
        sink.server(ServerFigures())
        sink.server(ServerFigures({("plugin_failures", ("acme", "on_startup")): 1, ("a_count_nobody_knows", ()): 2}))
        page = sink.page()
        assert page is None or isinstance(page[1], bytes), f"{spec.name}: page() is no (content type, bytes)"
    return len(sinks)


def _unanswered() -> RequestRecord:
    import dataclasses

    return dataclasses.replace(RECORD, finish="error", output_tokens=0, first_token=None)


def check_register_tokenizers(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Every tokenizer that recognises a sample decodes what it encoded; none recognises an empty folder."""
    found = contributed(registry, plugin, specs.TokenizerSpec)
    checked = 0
    with tempfile.TemporaryDirectory() as empty:
        for spec in found:
            sniff = loaded(spec.sniff, f"sniff of {spec.name}")
            assert not sniff(Path(empty)), f"tokenizer {spec.name} recognises an empty folder"
            assert (spec.load is None) != (spec.convert is None), f"tokenizer {spec.name} needs load or convert"
            for sample in samples:
                if spec.load is not None and sniff(sample):
                    _check_tokenizer(loaded(spec.load, "load")(sample), spec.name)
                    checked += 1
    assert checked or not samples, f"no tokenizer of plugin {plugin!r} recognises {list(map(str, samples))}"
    return len(found)


def _check_tokenizer(tokenizer: Tokenizer, name: str) -> None:
    pieces_of = getattr(tokenizer, "pieces", None)
    assert pieces_of is None or callable(pieces_of), (
        f"{name}: its attribute `pieces` has the name of a method that the server would call "
        f"(llmcore.api.Tokenizer); call it something else"
    )
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert all(0 <= i < tokenizer.vocab_size for i in ids), f"{name}: {text!r} becomes ids beyond the vocabulary"
        back = tokenizer.decode(ids)
        assert back.strip() == text.strip(), (
            f"{name}: {text!r} comes back as {back!r}; every text must, so give characters that the vocabulary lacks "
            f"ids too, those of their bytes for example"
        )
        raw = b"".join(tokenizer.token_bytes(i) for i in ids)
        assert raw.decode("utf-8", "replace").strip() == text.strip(), f"{name}: the bytes of {text!r} are {raw!r}"
        streamed = detokenizer(tokenizer)
        pieces = "".join([streamed.add(i) for i in ids]) + streamed.flush()
        assert pieces.strip() == text.strip(), f"{name}: {text!r} comes back token by token as {pieces!r}"
    for special in tokenizer.eos_ids:
        assert tokenizer.token(special), f"{name}: eos id {special} has no token"


def check_register_weight_loaders(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Every format's headers agree with its tensors, in samples it recognises; none recognises an empty folder."""
    found = contributed(registry, plugin, specs.WeightLoaderSpec)
    checked = 0
    with tempfile.TemporaryDirectory() as empty:
        for spec in found:
            sniff = loaded(spec.sniff, f"sniff of {spec.name}")
            assert not sniff(Path(empty)), f"format {spec.name} recognises an empty folder"
            for sample in samples:
                if sniff(sample):
                    check_checkpoint(loaded(spec.open, "open")(sample), spec.name)
                    checked += 1
    assert checked or not samples, f"no format of plugin {plugin!r} recognises {list(map(str, samples))}"
    return len(found)


def check_checkpoint(checkpoint: Checkpoint, name: str) -> None:
    """Headers agree with tensors."""
    assert checkpoint.config(), f"{name}: the checkpoint's config is empty"
    assert isinstance(checkpoint.generation_config(), dict)
    sizes = dict(checkpoint.sizes())
    for tensor, read in checkpoint.tensors():
        assert tensor in sizes, f"{name}: {tensor} is not in the headers"
        shape, dtype = sizes.pop(tensor)
        assert dtype.isupper(), f"{name}: {tensor} has the dtype {dtype!r}; spell it as safetensors does, as in 'BF16'"
        value = read()
        assert tuple(value.shape) == tuple(shape), f"{name}: {tensor} is {tuple(value.shape)}, its header says {shape}"
        assert value.device.type == "cpu", f"{name}: {tensor} is not on the host"
    assert not sizes, f"{name}: headers without a tensor: {sorted(sizes)[:5]}"


def check_register_dialects(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """No two routes want one path; broken bodies are 4xx, in JSON; what can be got is answered.

    A dialect that serves nothing by itself is tried with the plugin's flags given.
    """
    from llmcore.config import Config
    from llmcore.testing.fake_bridge import FakeBridge, fake_front
    from llmcore.testing.tokenizer import write_tokenizer
    from llmcore.text.tokenizer import load_tokenizer

    dialects = contributed(registry, plugin, specs.DialectSpec)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(write_tokenizer(Path(folder)))
    own = (spec for spec, owner in registry.specs(specs.OptionSpec) if owner.name == plugin)
    flags = {spec.name: True for spec in own if spec.type is bool}
    for spec in dialects:
        make = loaded(spec.make, f"make of {spec.name}")
        fronts = (
            fake_front(FakeBridge(), tokenizer, config=config)
            for config in (Config(), Config(plugin_options={**Config().plugin_options, **flags}))
        )
        routes = next(filter(None, (list(make(front)) for front in fronts)), [])
        _check_routes(routes, spec.name)
    return len(dialects)


def _check_routes(routes: Sequence[object], name: str) -> None:
    import falcon.testing

    from llmcore.http.app import build_app
    from llmcore.http.front import Route

    assert routes, f"dialect {name} serves nothing"
    good = [route for route in routes if isinstance(route, Route)]
    assert len(good) == len(routes), f"dialect {name} yields what is no api.http.Route"
    for route in good:
        assert route.path.startswith("/"), f"dialect {name}: path {route.path!r} does not start with /"
    client = falcon.testing.TestClient(build_app((route, name) for route in good))
    for route in good:
        responders = {method for method in ("get", "post", "put", "delete") if hasattr(route.resource, f"on_{method}")}
        assert responders, f"dialect {name}: nothing answers {route.path}; it needs on_get or on_post"
        path = route.path.replace("{", "").replace("}", "")
        if "get" in responders:
            assert client.simulate_get(path).status_code < 500, f"dialect {name}: GET {path} fails"
        if "post" in responders and "get" not in responders:
            for body in (b"", b"{", b"[]", b'{"x": NaN}', b"[" * 5000):
                result = client.simulate_post(path, body=body, content_type="application/json")
                assert 400 <= result.status_code < 500, f"dialect {name}: POST {path} {body[:9]!r} is {result.status}"
                assert result.json, f"dialect {name}: the error of POST {path} is no JSON"
