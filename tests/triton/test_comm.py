"""The kernels over several ranks: they compile for a Hopper, and a table of measurements chooses between them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from compiled_for_hopper import compiling, instructions
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.cli import main
from llmcore.registry.resolve import candidates_for, resolve
from llmcore_devtools import registry_of
from llmcore_devtools.family import small_model
from llmcore_triton import tuned
from llmcore_triton.comm.one_shot import OneShot
from llmcore_triton.comm.shared import BITS, Shared, _limit, sized
from llmcore_triton.comm.two_shot import TwoShot
from llmcore_triton.specs.comm import SLOT, SLOTS

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)


def slots(ranks: int, element: int) -> Shared:
    """Slots as on a GPU, on which nothing can be launched."""
    own = torch.empty(SLOTS * SLOT // element, dtype=BITS[element], device="meta")
    made = sized(1, ranks, own, torch.empty(ranks, dtype=torch.int64))
    return replace(made, state=torch.zeros(3, dtype=torch.int32))


@pytest.mark.parametrize(("ranks", "size"), [(2, 4096), pytest.param(8, 4096, marks=pytest.mark.compiled)])
def test_kernels_compile_for_a_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, size: int) -> None:
    compiled = compiling(tmp_path, monkeypatch)
    shape = {"group": "attn_tp", "ranks": ranks, "size": size}
    context = OpContext(op="comm.all_reduce", device=H200, dtype="bf16", bucket=1, shape=shape)
    one, two = OneShot(partial(slots, ranks), context), TwoShot(partial(slots, ranks), context)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(3, size, dtype=dtype)
        one.stacked(x)
        for op in (one, two):
            op.sum(x)
            op.add_norm(x, x.clone(), x[0], 1e-5)
    assert len(compiled) == 10
    for kernel in compiled:
        text = instructions(kernel, tmp_path)
        # a receiver reads 16 bytes at once from each other rank, and not from the L1 cache
        assert text.count("LDG.E.128.STRONG.SYS") >= ranks - 1
        assert "BPT.TRAP" in text  # a rank that waits for too long ends
        assert not re.findall(r"\b(?:LDL|STL)\b", text)  # no register is spilled


def test_a_limit_is_in_the_memory_that_kernels_read() -> None:
    with torch.inference_mode():
        state = slots(2, 2).state.clone()
    _limit(state, 0.25)
    assert state.tolist() == [0, 0, 250]


SUMS = pytest.mark.parametrize("op", ["comm.all_reduce", "reduce_add_rms_norm"])


def chosen(op: str, ranks: int, group: str = "attn_tp", pins: dict[str, str] | None = None, **more: bool) -> list[str]:
    """The kernel of each token bucket."""
    shape = {"group": group, "ranks": ranks, "size": 8192}
    contexts = [OpContext(op=op, device=H200, dtype="bf16", bucket=bucket, shape=shape, **more) for bucket in range(5)]
    found = candidates_for(registry_of(), op)
    return [resolve(found, context, pins or {}).chosen.name for context in contexts]


@SUMS
def test_one_shot_sums_until_a_table_says_otherwise(op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "_FOLDER", tmp_path)
    tuned._table.cache_clear()
    assert chosen(op, 2) == chosen(op, 8) == ["one_shot"] * 5
    assert chosen(op, 8, pins={op: "two_shot"}) == ["two_shot"] * 5
    measured = [("one_shot", 3, 9.0), ("two_shot", 3, 9.5), ("one_shot", 4, 90.0), ("two_shot", 4, 40.0)]
    entries = [
        {"op": op, "kernel": kernel, "dtype": "bf16", "bucket": bucket, "us": us, "config": {}}
        | {"shape": {"ranks": 8, "size": 8192}}
        for kernel, bucket, us in measured
    ]
    (tmp_path / "gpu.json").write_text(json.dumps({"gpu": H200.name, "capability": 90, "entries": entries}))
    tuned._table.cache_clear()
    try:
        for group in ("attn_tp", "moe_tp"):
            assert chosen(op, 8, group) == [*["one_shot"] * 4, "two_shot"]
        assert chosen(op, 8, deterministic=True) == [*["one_shot"] * 4, "two_shot"], "they have the same bits"
        assert chosen(op, 4) == ["one_shot"] * 5, "nothing is measured for other numbers of ranks"
    finally:
        tuned._table.cache_clear()


def test_both_kernels_share_their_buffers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_model("LlamaForCausalLM", num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)
    buffers = []
    for pins in ([], ["--kernel", "comm.all_reduce=two_shot"], ["--kernel", "reduce_add_rms_norm=two_shot"]):
        with pytest.raises(SystemExit):
            main(["plan", str(tmp_path), "--device", "sm90", "--memory", "80GiB", "--tp", "2", "--json", *pins])
        buffers.append(json.loads(capsys.readouterr().out)["budget"]["buffers"])
    assert buffers == [2 * SLOTS * SLOT] * 3
