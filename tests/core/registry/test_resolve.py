"""The rules by which a kernel is chosen, one test per rule, and properties over arbitrary candidates."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmcore.api.errors import ResolveError
from llmcore.api.specs import DeviceInfo, KernelSpec, OpContext, PluginInfo, Requires
from llmcore.registry.resolve import Candidate, Resolution, contains, resolve

CPU = DeviceInfo("cpu")
SM90 = DeviceInfo("cuda", capability=90)
SM80 = DeviceInfo("cuda", capability=80)


def plugin(name: str) -> PluginInfo:
    return PluginInfo(name, f"plugin-{name}", "1.0", name)


def kernel(name: str, priority: int = 50, owner: str = "a", cost: str | None = None, **when: object) -> Candidate:
    spec = KernelSpec(name=name, op="op", make="m:make", priority=priority, cost=cost, when=Requires(**when))  # type: ignore[arg-type]
    return spec, plugin(owner)


def context(device: DeviceInfo = SM90, **more: object) -> OpContext:
    return OpContext(op="op", device=device, dtype="bf16", **more)  # type: ignore[arg-type]


TORCH = kernel("torch", 0)


def cheap(context: OpContext) -> float | None:
    return 3.5


def dear(context: OpContext) -> float | None:
    return 12.0


def unmeasured(context: OpContext) -> float | None:
    return None


def broken(context: OpContext) -> float | None:
    raise KeyError("table")


def nan(context: OpContext) -> float | None:
    return float("nan")


def chosen(*candidates: Candidate, ctx: OpContext | None = None, order: tuple[str, ...] = ()) -> Resolution:
    return resolve(candidates, ctx or context(), {}, order)


def test_the_reference_is_taken_where_nothing_else_fits() -> None:
    found = chosen(TORCH, kernel("fast", device="cuda"), ctx=context(CPU))
    assert (found.chosen.name, found.why) == ("torch", "the only one that fits")
    assert found.reasons == {"fast": "needs device cuda, has cpu"}


def test_priority_beats_the_reference_and_the_reference_says_why() -> None:
    found = chosen(TORCH, kernel("fast", device="cuda"))
    assert (found.chosen.name, found.why) == ("fast", "highest priority")
    assert found.reasons == {"torch": "priority 0 < 50"}


@pytest.mark.parametrize(
    ("when", "reason"),
    [
        ({"capability": (90, 90)}, "needs capability 90-90, has 80"),
        ({"dtypes": frozenset({"f16", "f32"})}, "needs dtype f16 or f32, has bf16"),
        ({"layouts": frozenset({"token"})}, "needs layout token, has None"),
        ({"granules": frozenset({16})}, "needs granule 16, has 1"),
        ({"buckets": frozenset({0, 1})}, "is for steps of 1 or 2-16 tokens"),
        ({"shape": {"head": frozenset({64, 128})}}, "needs head 128 or 64, has 80"),
        ({"shape": {"window": frozenset({None})}}, "needs window None, has 12"),
    ],
)
def test_what_does_not_fit_says_what_it_needs(when: dict[str, object], reason: str) -> None:
    ctx = context(SM80, bucket=2, shape={"head": 80, "window": 12})
    assert chosen(TORCH, kernel("fast", **when), ctx=ctx).reasons["fast"] == reason


def test_a_device_without_capability_has_none() -> None:
    found = chosen(TORCH, kernel("fast", capability=(80, 90)), ctx=context(CPU))
    assert found.reasons["fast"] == "needs capability 80-90, has none"


def test_refusals_are_reasons_and_a_failing_refusal_declines() -> None:
    def refuses(ctx: OpContext) -> str | None:
        return "needs an even head count" if ctx.shape["heads"] == 3 else None

    def fails(ctx: OpContext) -> str | None:
        raise ValueError("boom")

    one = (KernelSpec(name="one", op="op", make="m:make", refuses=refuses), plugin("a"))
    two = (KernelSpec(name="two", op="op", make="m:make", refuses=fails), plugin("a"))
    reasons = chosen(TORCH, one, two, ctx=context(shape={"heads": 3})).reasons
    assert reasons == {"one": "needs an even head count", "two": "refuses() raised ValueError: boom"}


def test_among_equal_priorities_the_cheapest_wins_and_unmeasured_ranks_last() -> None:
    found = chosen(
        kernel("slow", cost=f"{__name__}:dear"),
        kernel("quick", cost=f"{__name__}:cheap"),
        kernel("new"),
        kernel("other", cost=f"{__name__}:unmeasured"),
    )
    assert (found.chosen.name, found.why) == ("quick", "lowest measured cost")
    assert found.reasons["slow"] == "takes 12 us, the chosen one 3.5 us"
    assert found.reasons["new"] == found.reasons["other"] == "unmeasured here, the chosen one takes 3.5 us"


@pytest.mark.parametrize("cost", ["broken", "nan"])
def test_a_cost_that_means_nothing_is_an_error_with_the_plugins_name(cost: str) -> None:
    with pytest.raises(ResolveError, match=r"plugin 'a'.*fast"):
        chosen(kernel("fast", cost=f"{__name__}:{cost}"), kernel("quick", cost=f"{__name__}:cheap"))


def test_the_narrower_requirement_wins() -> None:
    found = chosen(kernel("wide", device="cuda"), kernel("narrow", device="cuda", capability=(90, 90)))
    assert (found.chosen.name, found.why) == ("narrow", "narrowest requirement")
    assert found.reasons == {"wide": "narrow requires more and fits"}


def test_overlapping_requirements_are_not_contained() -> None:
    left = kernel("left", capability=(80, 90))
    right = kernel("right", capability=(90, 100), owner="b")
    with pytest.raises(ResolveError, match="more than one") as error:
        chosen(left, right)
    assert "--kernel op=left   (a)" in str(error.value)
    assert "--kernel op=right   (b)" in str(error.value)
    found = chosen(left, right, order=("b", "a"))
    assert (found.chosen.name, found.why) == ("right", "first in --plugins")
    assert found.reasons == {"left": "its plugin comes later in --plugins"}


def test_a_plugin_that_was_not_named_comes_after_those_that_were() -> None:
    assert chosen(kernel("x"), kernel("y", owner="b"), order=("b",)).chosen.name == "y"


def test_a_pin_wins_over_everything_that_fits() -> None:
    found = resolve([TORCH, kernel("fast")], context(), {"op": "torch"})
    assert (found.chosen.name, found.why, found.reasons) == ("torch", "pinned", {"fast": "torch is pinned"})
    assert resolve([TORCH, kernel("fast")], context(), {"other": "torch"}).chosen.name == "fast"


def test_a_pin_that_does_not_fit_says_why_and_lists_the_others() -> None:
    with pytest.raises(ResolveError) as error:
        resolve([TORCH, kernel("fast", device="cuda")], context(CPU), {"op": "fast"})
    assert "--kernel op=fast does not fit op on cpu, bf16, 1 tokens: needs device cuda, has cpu" in str(error.value)
    assert "torch (a): fits" in str(error.value)


def test_a_pin_that_does_not_exist_lists_what_does() -> None:
    with pytest.raises(ResolveError, match=r"no such kernel. Did you mean torch\?") as error:
        resolve([TORCH, kernel("fast", device="cuda")], context(CPU), {"op": "torhc"})
    assert "fast (a): needs device cuda, has cpu" in str(error.value)


def test_nothing_fits_lists_every_reason() -> None:
    with pytest.raises(ResolveError, match=r"no kernel for op on cpu, bf16, 17-64 tokens, head=64 fits") as error:
        chosen(kernel("fast", device="cuda"), ctx=context(CPU, bucket=2, shape={"head": 64}))
    assert "fast (a): needs device cuda, has cpu" in str(error.value)


def test_one_name_twice_is_an_error() -> None:
    with pytest.raises(ResolveError, match="two kernels for op are called 'x', by plugins 'a' and 'b'"):
        chosen(kernel("x"), kernel("x", owner="b"))


def test_deterministic_leaves_batch_invariant_kernels_only() -> None:
    steady = (KernelSpec(name="steady", op="op", make="m:make", priority=10, batch_invariant=True), plugin("b"))
    found = chosen(TORCH, kernel("fast"), steady, ctx=context(deterministic=True))
    assert (found.chosen.name, found.why) == ("steady", "the only one that fits")
    assert found.reasons["fast"] == "its results may depend on the batch, which --deterministic rules out"
    assert chosen(TORCH, kernel("fast"), steady).chosen.name == "fast"


def test_deterministic_without_a_kernel_says_which_declined_and_what_to_do() -> None:
    elsewhere = (
        KernelSpec(name="steady", op="op", make="m:make", when=Requires(device="cuda"), batch_invariant=True),
        plugin("b"),
    )
    with pytest.raises(ResolveError) as error:
        chosen(TORCH, elsewhere, ctx=context(CPU, deterministic=True))
    text = str(error.value)
    assert text.startswith("--deterministic: no kernel for op on cpu, bf16, 1 tokens fits")
    assert "torch (a): its results may depend on the batch" in text
    assert "steady (b): needs device cuda, has cpu" in text
    assert "install a plugin that brings one for this device, or leave --deterministic out" in text


# --- properties ------------------------------------------------------------------------------------------------

RANGES = st.sampled_from([None, (80, 90), (90, 90), (80, 80), (89, 100)])
REQUIRES = st.builds(
    Requires,
    device=st.sampled_from([None, "cuda", "cpu"]),
    capability=RANGES,
    dtypes=st.frozensets(st.sampled_from(["f16", "bf16"])),
    buckets=st.frozensets(st.integers(0, 2)),
    shape=st.dictionaries(st.just("head"), st.frozensets(st.sampled_from([64, 128]), min_size=1), max_size=1),
)
SPECS = st.builds(
    lambda priority, when, owner, cost: (priority, when, owner, cost),
    st.sampled_from([0, 50, 80]),
    REQUIRES,
    st.sampled_from("abc"),
    st.sampled_from([None, f"{__name__}:cheap", f"{__name__}:dear", f"{__name__}:unmeasured"]),
)
CONTEXTS = st.builds(
    lambda device, bucket, head: context(device, bucket=bucket, shape={"head": head}),
    st.sampled_from([CPU, SM80, SM90]),
    st.integers(0, 2),
    st.sampled_from([64, 128]),
)


def outcome(candidates: list[Candidate], ctx: OpContext, order: tuple[str, ...]) -> object:
    try:
        found = resolve(candidates, ctx, {}, order)
    except ResolveError as error:
        return str(error)
    return found.chosen.name, found.why, dict(found.reasons)


@given(st.data(), st.lists(SPECS, min_size=1, max_size=5), CONTEXTS, st.permutations("abc"))
@settings(max_examples=150, deadline=None)
def test_the_order_of_candidates_never_matters(
    data: st.DataObject, drawn: list[tuple[int, Requires, str, str | None]], ctx: OpContext, order: list[str]
) -> None:
    candidates = [
        (KernelSpec(name=f"k{i}", op="op", make="m:make", priority=p, when=w, cost=c), plugin(o))
        for i, (p, w, o, c) in enumerate(drawn)
    ]
    shuffled = data.draw(st.permutations(candidates))
    result = outcome(candidates, ctx, tuple(order))
    assert outcome(shuffled, ctx, tuple(order)) == result
    if isinstance(result, tuple):
        assert {result[0], *result[2]} == {spec.name for spec, _ in candidates}, "every loser has its reason"


@given(REQUIRES, REQUIRES, CONTEXTS)
@settings(max_examples=200, deadline=None)
def test_a_contained_requirement_admits_no_context_that_the_wider_one_does_not(
    wide: Requires, narrow: Requires, ctx: OpContext
) -> None:
    def fits(when: Requires) -> bool:
        return outcome([(KernelSpec(name="k", op="op", make="m:make", when=when), plugin("a"))], ctx, ())[0] == "k"

    assert contains(wide, wide)
    if contains(wide, narrow) and fits(narrow):
        assert fits(wide)
