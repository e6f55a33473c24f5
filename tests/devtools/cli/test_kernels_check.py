"""`llmcore kernels --check`: right kernels pass, wrong ones are named with the reason, others say why they decline."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from llmcore.api.errors import ConfigError
from llmcore.api.models import AttnSpec
from llmcore.api.specs import DeviceInfo, KernelSpec, OpContext, Requires
from llmcore.cli.kernels import command
from llmcore.ops import attn_gqa_decode, attn_gqa_mixed, attn_gqa_prefill, draw, drawing, rms_norm, rope_kv_write
from llmcore.ops.attention import attend, shape_of
from llmcore.registry.loader import load
from llmcore.registry.resolve import candidates_for
from llmcore_devtools.kernels.attention_cases import cases_of
from llmcore_devtools.kernels.attention_stored import over_its_layout
from llmcore_devtools.kernels.check import contexts
from llmcore_devtools.kernels.compare import check as check_op
from llmcore_devtools.kernels.compare import check_invariance, compare
from llmcore_devtools.kernels.write_stored import DoesNotFit
from llmcore_devtools.loaded_model import registry_for_tests
from llmcore_quantization.ops import linear_w8a8

SHAPES = len(getattr(rms_norm, "SHAPES", ({},)))

HEAD = """
import torch
from llmcore.api import KernelSpec, Requires, hookimpl

@hookimpl
def register_kernels():
    where = f"{__name__}:make"
    yield KernelSpec(op="rms_norm", name="mine", make=where, when=Requires(REQUIRES), batch_invariant=INVARIANT)
"""

RIGHT = """
def make(context):
    def run(x, weight, eps):
        wide = x.float()
        return (wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)
    return run
"""

WRONG = """
def make(context):
    return lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, None, eps)
"""

UNWRITTEN = """
def make(context):
    def run(x, weight, eps):
        out = torch.empty_like(x)
        out[:-1] = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)[:-1]
        return out
    return run
"""


def check(
    tmp_path: Path, code: str, *options: str, requires: str = "", invariant: bool = False
) -> tuple[Result, dict[str, dict]]:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))  # a module is imported once
    file = folder / "mine.py"
    file.write_text(HEAD.replace("REQUIRES", requires).replace("INVARIANT", str(invariant)) + code)
    arguments = ["rms_norm", "--check", "--json", "--device", "cpu", "--plugins", str(file), *options]
    result = CliRunner().invoke(command, arguments)
    return result, {row["dtype"]: row for row in json.loads(result.stdout)}


def test_a_right_kernel_passes_in_every_dtype_and_bucket(tmp_path: Path) -> None:
    result, rows = check(tmp_path, RIGHT)
    assert result.exit_code == 0 and set(rows) == {"f32", "f16", "bf16"}
    # three samples for each of eight token counts
    assert all(row["cases"] == 32 * SHAPES and 0 <= row["worst"] <= 1 and not row["failures"] for row in rows.values())
    assert "seed" in result.stderr


def test_a_wrong_kernel_is_named_and_the_exit_code_says_so(tmp_path: Path) -> None:
    result, rows = check(tmp_path, WRONG, "--dtype", "fp32", "--seed", "3")
    assert result.exit_code == 1 and rows["f32"]["failed"] == 5 * SHAPES
    first = rows["f32"]["failures"][0]
    assert first.startswith("1 tokens") and "rms_norm, samples 1, output 0: off by" in first


def test_what_a_kernel_leaves_unwritten_is_found(tmp_path: Path) -> None:
    result, rows = check(tmp_path, UNWRITTEN, "--dtype", "fp32")
    assert result.exit_code == 1 and "NaN where the reference has none" in rows["f32"]["failures"][0]


def test_a_kernel_for_another_device_declines(tmp_path: Path) -> None:
    result, rows = check(tmp_path, RIGHT, requires="device='abacus'")
    assert result.exit_code == 0 and rows["f16"]["declined"] == "needs device abacus, has cpu"


@pytest.mark.parametrize("op", ["linear.w4a16", "linear.w8a16", "linear.w8a8", "linear.fp8_block"])
def test_a_composite_without_a_kernel_is_checked_as_its_parts(op: str) -> None:
    arguments = [op, "--check", "--json", "--device", "cpu", "--dtype", "fp32", "--plugins=-triton"]
    (row,) = json.loads(CliRunner().invoke(command, arguments).stdout)
    assert (row["kernel"], row["plugin"], row["failures"]) == ("parts", "quantization", [])
    assert row["cases"] >= 16 and 0 <= row["worst"] <= 1
    (row,) = json.loads(CliRunner().invoke(command, [*arguments, "--deterministic"]).stdout)
    assert row["declined"] == "--deterministic: no kernel for linear" and not row["failures"]


def test_a_composite_is_checked_as_its_parts_if_no_kernel_is_deterministic() -> None:
    arguments = ["linear.w8a8", "--check", "--json", "--device", "cpu", "--dtype", "fp32", "--deterministic"]
    rows = {row["kernel"]: row for row in json.loads(CliRunner().invoke(command, arguments).stdout)}
    assert rows.pop("parts")["declined"] == "--deterministic: no kernel for linear"
    assert rows and all("may depend on the batch" in row["declined"] for row in rows.values())
    arguments[0] = "rms_norm_quant"  # has one, for a GPU
    assert "parts" not in {row["kernel"] for row in json.loads(CliRunner().invoke(command, arguments).stdout)}


def test_rows_that_are_quantized_do_not_depend_on_the_rows_beside_them() -> None:
    for op in ("quantize_rows", "silu_and_mul_quant"):
        arguments = [op, "--check", "--json", "--device", "cpu", "--dtype", "fp16", "--deterministic", "--kernel"]
        (row,) = json.loads(CliRunner().invoke(command, [*arguments, f"{op}=torch"]).stdout)
        assert row["cases"] >= 10 and not row["failures"] and row["worst"] == 0


def test_a_quantized_linears_rows_are_computed_again_alone() -> None:
    """Parts that round a token by the tokens beside it have other bits."""
    context = OpContext(op="linear.w8a8", device=DeviceInfo("cpu"), dtype="f32", bucket=1, shape=linear_w8a8.SHAPES[0])
    sample = next(sample for sample in linear_w8a8.samples(context) if len(sample[0]) > 1)
    multiply = linear_w8a8.make(context)

    def alone(x: torch.Tensor, scale: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return torch.cat([multiply(x[i, None], scale[i, None], *rest) for i in range(len(x))])

    def together(x: torch.Tensor, scale: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return alone(x, scale, *rest) * scale.amax()

    check_invariance(context.op, alone, alone, sample, torch.device("cpu"))
    with pytest.raises(AssertionError, match="has other bits alone"):
        check_invariance(context.op, together, together, sample, torch.device("cpu"))


def test_deterministic_compares_rows_with_themselves_alone(tmp_path: Path) -> None:
    right, rows = check(tmp_path, RIGHT, "--dtype", "fp32", "--deterministic", invariant=True)
    assert right.exit_code == 0 and rows["f32"]["cases"]
    code = RIGHT.replace("x.float()", "(x.double() if len(x) > 1 else x)")
    wrong, rows = check(tmp_path, code, "--dtype", "fp32", "--deterministic", invariant=True)
    assert wrong.exit_code == 1 and "has other bits alone" in rows["f32"]["failures"][0]
    assert check(tmp_path, code, "--dtype", "fp32")[0].exit_code == 0, "it is close enough otherwise"
    _, rows = check(tmp_path, RIGHT, "--dtype", "fp32", "--deterministic")
    assert "--deterministic rules out" in rows["f32"]["declined"]


def test_attention_rows_alone_and_in_chunks() -> None:
    shape = shape_of(AttnSpec(heads=4, kv_heads=2, key_size=8, value_size=8, scale=8**-0.5))
    context = OpContext(op="attn", device=DeviceInfo("cpu"), dtype="f32", layout="token", bucket=1, shape=shape)
    kernel = attn_gqa_prefill.make(context)

    class ByQuery:
        """Every query by itself, so that nothing depends on the others."""

        workspace, plan = kernel.workspace, kernel.plan

        def run(self, q, k_new, v_new, kv, meta, out, lse=None):
            borders = meta["q_start"].tolist()
            for row, length in enumerate(meta["kv_len"].tolist()):
                slots = meta["table"][meta["request"][row]].long()
                for at in range(borders[row], borders[row + 1]):
                    own = slots[: length - borders[row + 1] + at + 1]
                    out[at] = attend(q[at : at + 1], kv[0][own], kv[1][own], kernel.spec)[0][0]
            return out

    samples = list(cases_of(attn_gqa_prefill, context, attn_gqa_prefill.samples(context)))
    for sample in samples:
        check_invariance("attn.gqa.prefill", ByQuery(), ByQuery(), sample, torch.device("cpu"))

    class OtherAlone(ByQuery):
        def run(self, *args):
            return super().run(*args).mul_(1 + 1e-6)

    with pytest.raises(AssertionError, match="other bits alone"):
        check_invariance("attn.gqa.prefill", ByQuery(), OtherAlone(), samples[0], torch.device("cpu"))


INT8 = Path(__file__).parents[3] / "docs" / "examples" / "int8" / "int8_kv.py"


def check_int8(tmp_path: Path, code: str) -> tuple[Result, dict]:
    file = Path(tempfile.mkdtemp(dir=tmp_path)) / "int8_kv.py"
    file.write_text(code)
    arguments = ["attn.gqa.decode", "--check", "--json", "--device", "cpu", "--dtype", "fp32", "--seed", "7"]
    arguments += ["--kernel", "attn.gqa.decode=int8-heads", "--plugins", str(file)]
    result = CliRunner().invoke(command, arguments)
    [row] = json.loads(result.stdout)
    return result, row


def test_attention_over_a_layout_of_a_plugin_gets_its_pools(tmp_path: Path) -> None:
    right = INT8.read_text()
    result, row = check_int8(tmp_path, right)
    assert result.exit_code == 0 and row["cases"] and row["failures"] == []
    result, row = check_int8(tmp_path, right.replace("(pool * scales[..., None]).to(q.dtype)", "pool.to(q.dtype)"))
    assert result.exit_code == 1 and "off by" in row["failures"][0]
    result, row = check_int8(tmp_path, right.replace("KVLayoutSpec(name=LAYOUT", 'KVLayoutSpec(name="other"'))
    assert result.exit_code == 1 and "int8-heads" in row["failures"][0]


def test_long_samples_over_a_layout_of_a_plugin() -> None:
    registry = registry_for_tests([str(INT8)])
    shape = shape_of(AttnSpec(heads=4, kv_heads=1, key_size=8, value_size=8, scale=8**-0.5))
    context = OpContext(
        op="attn.gqa.decode", device=DeviceInfo("cpu"), dtype="f32", layout="int8-heads", granule=4, shape=shape
    )
    [spec] = [spec for spec, _ in candidates_for(registry, context.op) if spec.name == "int8-heads"]
    made = load(spec.make)(context)
    token = replace(context, layout="token")
    assert over_its_layout(registry, attn_gqa_decode, token) == (attn_gqa_decode, token)
    tried, read = over_its_layout(registry, attn_gqa_decode, context)
    [sample] = next(tried.long_samples(read))
    assert compare(tried, made, context, (sample,), torch.device("cpu"), long=True) < 1
    [plain] = next(cases_of(attn_gqa_decode, token, attn_gqa_decode.long_samples(token), long=True))
    lost = (plain.expected()[0] - sample.expected()[0]).abs().max()
    assert lost > 10 * attn_gqa_decode.TOLERANCE["f32"]


def test_heads_that_a_layout_does_not_take_are_left_out() -> None:
    registry = registry_for_tests()
    shape = shape_of(AttnSpec(heads=4, kv_heads=1, key_size=40, value_size=40, scale=0.2))
    context = OpContext(op="attn.gqa.decode", device=DeviceInfo("cpu"), dtype="f32", layout="token-int4", shape=shape)
    with pytest.raises(DoesNotFit, match="groups of 32 do not divide a head of 40"):
        over_its_layout(registry, attn_gqa_decode, context)
    with pytest.raises(ConfigError, match="token-int2"):
        over_its_layout(registry, attn_gqa_decode, replace(context, layout="token-int2"))


def test_a_kernel_for_many_layouts_gets_each_in_some_bucket() -> None:
    names = [f"codes{number}" for number in range(6)]
    kernel = KernelSpec(
        op="attn.gqa.decode", name="n", make="m:m", when=Requires(layouts=frozenset({"token", *names}))
    )
    base = OpContext(op=kernel.op, device=DeviceInfo("cpu"), dtype="f32")
    tried = [(where.layout, where.granule, where.bucket) for where in contexts(kernel, attn_gqa_decode, base)]
    assert {tuple(rest) for layout, *rest in tried if layout == "token"} == set(product((1, 4), range(5)))
    assert [(layout, granule) for layout, granule, _ in tried if layout != "token"] == list(product(names, (1, 4)))
    assert {bucket for layout, _, bucket in tried if layout != "token"} == set(range(5))


def test_writes_into_a_layout_of_a_plugin_get_its_pools() -> None:
    shape = {"heads": 3, "kv_heads": 2, "size": 8, "rotated": 8}
    context = OpContext(
        op="rope_kv_write",
        device=DeviceInfo("cpu"),
        dtype="f32",
        layout="int8-heads",
        granule=4,
        bucket=1,
        shape=shape,
    )
    registry = registry_for_tests([str(INT8)])
    assert over_its_layout(registry, rope_kv_write, replace(context, layout="token"))[0] is rope_kv_write
    module, same = over_its_layout(registry, rope_kv_write, context)
    assert same == context and check_op(module, module.reference, context) > 0

    def unrounded(qk, v, *rest):
        return module.reference(qk, v.clone(), *rest)

    def elsewhere(qk, v, cos, sin, kv, slots):
        beside = torch.tensor([slot for slot in range(len(kv[0])) if slot not in slots.tolist()][:1])
        kv[0][beside] = 0
        return module.reference(qk, v, cos, sin, kv, slots)

    def other_keys(qk, v, *rest):
        return module.reference(qk * 1.1, v, *rest)

    wrong = ((unrounded, "values that the call leaves"), (elsewhere, "other slots"), (other_keys, "off by"))
    for kernel, told in wrong:
        with pytest.raises(AssertionError, match=told):
            check_op(module, kernel, context)


def test_several_processes_share_the_work(tmp_path: Path) -> None:
    result, rows = check(tmp_path, WRONG, "--jobs", "2", "--seed", "7")
    assert result.exit_code == 1 and {row["failed"] for row in rows.values()} == {5 * SHAPES}


def test_several_ops(tmp_path: Path) -> None:
    """In several processes, too."""
    given = ["--check", "--json", "--device", "cpu", "--dtype", "fp32", "--jobs", "2"]
    found = json.loads(CliRunner().invoke(command, ["linear", "silu_and_mul", *given]).stdout)
    assert {row["op"] for row in found} == {"linear", "silu_and_mul"}


def test_an_op_that_does_not_exist(tmp_path: Path) -> None:
    assert "there is no op 'rmsnorm'" in str(CliRunner().invoke(command, ["rmsnorm", "--check"]).exception)


def test_inputs_are_drawn_anew_for_every_seed() -> None:
    context = OpContext(op="linear", device=DeviceInfo("cpu"), dtype="f32")
    plain = draw(context, 4)
    with drawing(5, torch.device("cpu")):
        other = draw(context, 4)
    assert not torch.equal(plain, other) and torch.equal(plain, draw(context, 4))


@pytest.mark.parametrize("module", [attn_gqa_decode, attn_gqa_prefill, attn_gqa_mixed])
def test_long_attention_is_held_to_the_size_of_each_result(module) -> None:
    shape = shape_of(AttnSpec(heads=4, kv_heads=1, key_size=8, value_size=8, scale=8**-0.5))
    context = OpContext(op="attn", device=DeviceInfo("cpu"), dtype="bf16", layout="token", bucket=1, shape=shape)
    kernel = module.make(context)
    run = kernel.run

    def forgets_the_first_half(q, k_new, v_new, kv, meta, out, lse=None):
        table = meta["table"].clone()
        for row, length in zip(meta["request"].tolist(), meta["kv_len"].tolist(), strict=True):
            table[row, : length // 2] = table[row, length // 2 : 2 * (length // 2)]
        return run(q, k_new, v_new, kv, {**meta, "table": table}, out, lse)

    sample = next(cases_of(module, context, module.long_samples(context), long=True))
    assert compare(module, kernel, context, sample, torch.device("cpu"), long=True) < 1
    kernel.run = forgets_the_first_half
    with pytest.raises(AssertionError, match="off by"):
        compare(module, kernel, context, sample, torch.device("cpu"), long=True)
