"""Build, the argument of a family's `build`: the device, the mesh, and kernels per token bucket.

Weight quantization plugs in as a LinearMethod, which owns every tensor of its linears.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from llmcore.api.errors import ConfigError, LlmcoreError, PluginError, reraise_if_stopping
from llmcore.api.models import AttnSpec, KVGroupSpec, LayerInfo, ModelConfig
from llmcore.api.protocols import AttentionKernel, Checkpoint
from llmcore.api.specs import TOKEN_BUCKETS, DeviceInfo, KVLayoutSpec, OpContext, OpSpec
from llmcore.layers.layout import Layout
from llmcore.layers.mesh import Mesh
from llmcore.ops import DTYPES, Op, made, packing
from llmcore.ops.attention import shape_of
from llmcore.registry.loader import load
from llmcore.registry.modes import Pins
from llmcore.registry.registry import Registry
from llmcore.registry.resolve import REFERENCE, Resolution, candidates_for, describe, resolve
from llmcore.weights.map import Placement, Shard


class AttentionKernels(NamedTuple):
    """The attention kernels of one KV group, by token bucket of the step.

    Before every step the model runner calls `decode[bucket].plan(rows, into)` if the group has decode rows, and
    `prefill[bucket].plan(rows, into)` if it has prefill rows. Before a captured step with both kinds of rows it calls
    `mixed[bucket].plan(rows, into)` instead.
    """

    decode: tuple[AttentionKernel, ...]
    prefill: tuple[AttentionKernel, ...]
    mixed: tuple[AttentionKernel, ...]


class Rounded(NamedTuple):
    """Rows that are quantized for the one linear that reads them, in place of a tensor [T, size].

    `codes` [T, size]; `scale` [T, groups] f32.
    """

    codes: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class InputForm:
    """The form in which a linear would like to read its inputs.

    `suffix`: the op that writes them is called `<op>_<suffix>`, for example `rms_norm_quant`. It returns codes and
    scale instead of the tensor that op `rms_norm` returns. `shape`: the fields that this op's shape has in addition
    to those of the plain op.
    """

    suffix: str
    shape: Mapping[str, Any]


class Source(Protocol):
    """A layer whose output one linear reads, and which can write it as the linear would like to read it."""

    def write(self, form: InputForm | None) -> None:
        """From now on, return a Rounded of this form instead of a tensor if there is an op that writes it.

        None: return tensors. The linear takes both.
        """


LinearCall = Callable[[Any], torch.Tensor]
"""x [T, inputs], or a Rounded of the form `Bound.takes` -> [T, outputs], or [T, outputs / 2] with the shape's
activation."""


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """The sizes of a linear on this rank, and its place in the model and in the checkpoint."""

    name: str = ""
    """Its path in the model, as the family names it: "layers.0.self_attn.qkv_proj"."""
    inputs: int
    outputs: int
    parts: Mapping[str, int] = field(default_factory=dict)
    """Checkpoint module -> its rows, for the modules that this linear stacks, in order; {} for a single module."""
    bias: bool = False
    shard: Shard | None = None
    """The cut of outputs (dim 0) or inputs (dim 1) over the ranks."""
    replicated: frozenset[str] = frozenset()
    """The parts that every rank has whole, in spite of `shard`."""
    shared: nn.Parameter | None = None
    """A plain weight that another module owns and also reads, to use instead of a new one."""
    whole: bool = False
    """A `shared` weight has the outputs of all ranks, of which this rank multiplies its own."""
    totals: Mapping[str, int] = field(default_factory=dict)
    """Part ("": the only one) -> its outputs over all ranks, if outputs are cut."""
    activation: str | None = None
    """The op from [T, outputs] to [T, outputs / 2] that the method computes together with the linear. It is set only
    if the method names it in `activations`."""

    def placement(self, *, columns: bool = True) -> Placement:
        """The Placement of a tensor that has one row per output.

        `columns`: its second dimension runs along the inputs. A tensor without it, such as a bias, is whole on every
        rank if the inputs are cut.
        """
        parts, first = {}, 0
        for name, rows in self.parts.items():
            parts[name] = (first, rows)
            first += rows
        cut = columns or (self.shard is not None and self.shard.dim == 0)
        return Placement(parts, self.shard if cut else None, self.replicated, totals=self.totals)


class Bound(Protocol):
    """The tensors of one linear.

    It may have an attribute `takes`, the InputForm that its calls take beside tensors. Without it, or if it is None,
    they take tensors alone.
    """

    def tensors(self) -> Mapping[str, tuple[nn.Parameter, Placement]]:
        """The allocated parameters by name, each with its Placement: how a checkpoint fills it."""

    def bind(self) -> tuple[tuple[LinearCall, ...], frozenset[str]]:
        """A callable for each of TOKEN_BUCKETS, and the names of parameters that are no longer needed.

        Called once, after the tensors are filled. A callable maps x [T, inputs] to [T, outputs], with the bias added
        and the activation applied. A parameter is no longer needed if the callables hold another form of it. If the
        inputs are cut over ranks, the layer sums the results; the callable does not. Of a tensor `bias`, all ranks but
        the first then have zeros.
        """

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill the tensor of parameter `name` with random numbers, for `--load_format dummy`.

        The weights that the tensors stand for should have a standard deviation of about 0.02, and random bits: a
        benchmark of zeros draws less power, so it is too fast.
        """


class LinearMethod(Protocol):
    """Decides how linears hold and multiply their weights."""

    @property
    def activations(self) -> frozenset[str]:
        """Names of the ops that its linears can compute themselves (`LinearShape.activation`).

        The layer applies all others. A method that computes none returns ``frozenset()``.
        """

    @property
    def multiples(self) -> tuple[int, int]:
        """Over ranks, outputs are cut in multiples of the first number, inputs in multiples of the second.

        Plain weights have (1, 1). Groups of inputs that share a scale stay whole.
        """

    def create(self, shape: LinearShape, build: Build) -> Bound:
        """The tensors of one linear. Their Placements say along which axis each is cut."""


class Unquantized:
    """The LinearMethod for weights in the model's dtype. It uses op `linear` or `linear_<activation>`."""

    activations = frozenset({"silu_and_mul"})
    multiples = (1, 1)

    def create(self, shape: LinearShape, build: Build) -> Bound:
        """A weight and, if the shape has one, a bias."""
        return _Plain(shape, build)


class _Plain:
    def __init__(self, shape: LinearShape, build: Build) -> None:
        self.shape, self.mesh = shape, build.mesh
        if shape.activation is None:
            self.ops = build.op("linear", inputs=shape.inputs, outputs=shape.outputs, bias=shape.bias)
        else:
            half = shape.outputs // 2
            self.ops = build.op(f"linear_{shape.activation}", inputs=shape.inputs, size=half, bias=shape.bias)
        self.weight = build.empty(shape.outputs, shape.inputs) if shape.shared is None else shape.shared
        self.bias = build.empty(shape.outputs) if shape.bias else None
        self.whole = shape.whole and shape.shared is not None

    def tensors(self) -> Mapping[str, tuple[nn.Parameter, Placement]]:
        placement = Placement(totals=self.shape.totals) if self.whole else self.shape.placement()
        tensors = {"weight": (self.weight, placement)}
        if self.bias is not None:
            tensors["bias"] = (self.bias, self.shape.placement(columns=False))
        return tensors

    def bind(self) -> tuple[tuple[LinearCall, ...], frozenset[str]]:
        pack = None if self.shape.shared is not None else packing(self.ops)
        weight = self.own_rows() if pack is None else pack(self.weight.data)
        bias = None if self.bias is None else self.bias.data
        calls = tuple(partial(_call, op, weight, bias) for op in self.ops)
        del self.weight
        return calls, frozenset() if pack is None else frozenset({"weight"})

    def own_rows(self) -> torch.Tensor:
        """The weight [outputs, inputs] of this rank."""
        if not self.whole or self.shape.shard is None:
            return self.weight.data
        rank = self.mesh.rank(self.shape.shard.group)
        return self.weight.data.narrow(0, rank * self.shape.outputs, self.shape.outputs)

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        fill_normal(name, tensor, generator)


def fill_normal(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Fill the tensor of parameter `name` with N(0, 0.02), the size of most weights, for `--load_format dummy`."""
    tensor.normal_(0.0, 0.02, generator=generator)


def _call(op: Op, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = op(x, weight, bias)
    return y


def _rounded(op: Op, *arguments: Any) -> Any:
    codes, scale, *rest = op(*arguments)
    return (Rounded(codes, scale), *rest) if rest else Rounded(codes, scale)


@dataclass(kw_only=True)
class Build:
    """The construction of one model for one device.

    `granules`: KV group -> tokens per granule; 1 for groups that are missing.
    `mesh`: the ranks that share the model, and which of them this process is.
    `longest_request`: tokens of the longest request to expect; None: the longest that the model takes.
    `notes`: label -> text, for choices of modules that the start-up summary shows to the operator.
    `resolutions`: every kernel choice so far, in order, for listings, the ModelReport and the fingerprint.
    `attention_kernels`, `attention_specs`: by KV group, the kernels that `attention` bound, and their AttnSpec.
    """

    registry: Registry
    config: ModelConfig
    device: DeviceInfo
    torch_device: torch.device
    pins: Pins = field(default_factory=Pins)
    order: Sequence[str] = ()
    granules: Mapping[str, int] = field(default_factory=dict)
    deterministic: bool = False
    mesh: Mesh = field(default_factory=Mesh)
    longest_request: int | None = None
    notes: dict[str, str] = field(default_factory=dict, init=False)
    resolutions: list[Resolution] = field(default_factory=list, init=False)
    attention_kernels: dict[str, AttentionKernels] = field(default_factory=dict, init=False)
    attention_specs: dict[str, AttnSpec] = field(default_factory=dict, init=False)
    _bound: dict[object, tuple[Any, ...]] = field(default_factory=dict, init=False)
    _layouts: dict[str, Layout] = field(default_factory=dict, init=False)

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and activations."""
        return DTYPES[self.config.dtype]

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """An uninitialized parameter in the model's dtype, on its device."""
        tensor = torch.empty(*shape, dtype=self.dtype, device=self.torch_device)
        return torch.nn.Parameter(tensor, requires_grad=False)

    def op(
        self,
        name: str,
        *,
        layout: str | None = None,
        granule: int = 1,
        given: Mapping[str, Op | tuple[Op, ...]] | None = None,
        **shape: Any,
    ) -> tuple[Op, ...]:
        """The op's callable for each token bucket. A layer calls ``ops[step.bucket](...)``.

        A composite without its own kernel becomes its expansion. `given` supplies what is not an op: a layout's
        `write` as the part `kv_write` of a composite, its `gather` as `kv_gather` for attention. It may also supply
        an op of the expansion, as a callable for each token bucket; the composite then has no kernel of its own. Calls
        with equal arguments return the same callables.
        """
        parts: dict[str, Any] = dict(given or {})
        gather = parts.get("kv_gather")
        key = (name, layout, granule, tuple(sorted(shape.items())), tuple(sorted(parts.items(), key=lambda p: p[0])))
        if key not in self._bound:
            self._bound[key] = tuple(
                self._make(replace(self._context(name, bucket, layout, granule, shape), gather=gather), parts)
                for bucket in range(len(TOKEN_BUCKETS))
            )
        return self._bound[key]

    def writer(self, name: str, form: InputForm | None, **shape: Any) -> tuple[Op, ...]:
        """As `op`, with the first result of the callables in `form`, as a Rounded, if the registry has such an op."""
        if form is None or all(spec.name != f"{name}_{form.suffix}" for spec, _ in self.registry.specs(OpSpec)):
            return self.op(name, **shape)
        return tuple(partial(_rounded, op) for op in self.op(f"{name}_{form.suffix}", **shape, **form.shape))

    def attention(
        self,
        spec: AttnSpec,
        group: str,
        ops: str = "attn.gqa",
        wrap: Callable[[AttentionKernels], AttentionKernels] | None = None,
    ) -> AttentionKernels:
        """The kernels of a KV group: ops `<ops>.decode`, `.prefill` and `.mixed`, passed through `wrap` once.

        All layers of the group share them. Raises ConfigError if two layers want different AttnSpecs.
        """
        if (other := self.attention_specs.setdefault(group, spec)) != spec:
            raise ConfigError(f"KV group {group!r} has two kinds of attention, {other} and {spec}; declare two groups")
        if group not in self.attention_kernels:
            where = self.kv_group(group)
            fixed = {"layout": where.layout, "granule": self.granules.get(group, 1), **shape_of(spec)}
            parts = {"kv_gather": self.layout(group).gather}
            made: dict[str, Any] = {
                kind: self.op(f"{ops}.{kind}", given=parts, **fixed) for kind in AttentionKernels._fields
            }
            kernels = AttentionKernels(**made)
            self.attention_kernels[group] = kernels if wrap is None else wrap(kernels)
        return self.attention_kernels[group]

    def comm(self, name: str, group: str, size: int) -> tuple[Op, ...] | None:
        """The callables of op `comm.<name>` over a mesh group, for rows of `size` numbers; None if it has one rank."""
        ranks = self.mesh.size(group)
        return None if ranks == 1 else self.op(f"comm.{name}", group=group, ranks=ranks, size=size)

    def reduce(self, group: str, size: int) -> tuple[Op, ...] | None:
        """The callables that sum rows of `size` numbers over the ranks of a mesh group; None if it has one rank."""
        return self.comm("all_reduce", group, size)

    def reducers(self, name: str, size: int) -> dict[str, tuple[Op, ...]]:
        """Mesh group of several ranks -> the callables of op `name`, which sums rows of `size` over its ranks."""
        groups = {group: self.mesh.size(group) for group in ("attn_tp", "moe_tp")}
        return {
            group: self.op(name, group=group, ranks=ranks, size=size) for group, ranks in groups.items() if ranks > 1
        }

    def kv_group(self, name: str) -> KVGroupSpec:
        """The model's KV group `name`, with the layout that a mode pinned for it, if any. Raises ConfigError."""
        for group in self.config.kv_groups:
            if group.name == name:
                return self.pins.stored(group)
        known = ", ".join(group.name for group in self.config.kv_groups)
        raise ConfigError(f"the model has no KV group {name!r}; its config declares {known}")

    def layout(self, group: str) -> Layout:
        """The layout object of a KV group, one for all its layers. If it is sharded, it has this rank's KV heads."""
        if group not in self._layouts:
            spec, cut = self.kv_group(group), Shard("attn_tp", 0, repeat=True)
            make = load(self.registry.find(KVLayoutSpec, spec.layout).make)
            layout: Layout = make(spec, self.granules.get(group, 1), self.config.dtype)
            if layout.sharded and self.mesh.size(cut.group) > 1:
                share = self.mesh.share(spec.kv_heads, cut, "KV heads")
                layout = make(replace(spec, kv_heads=share), layout.granule, self.config.dtype)
                rank, ranks = self.mesh.rank(cut.group), self.mesh.size(cut.group)
                layout.whole, layout.first_head = spec, cut.held(spec.kv_heads, share, rank, ranks)[0]
            self._layouts[group] = layout
        return self._layouts[group]

    def calibrate(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        """Fill the constants of every group's layout from a checkpoint, as it is on disk, and the options of plugins.

        Raises ConfigError, as the layouts do.
        """
        for group in self.config.kv_groups:
            layout = self.layout(group.name)
            if (fill := self.registry.find(KVLayoutSpec, layout.group.layout).calibrate) is not None:
                load(fill)(layout, self.config, checkpoint, options)

    def layer(self, module: torch.nn.Module, name: str, index: int) -> torch.nn.Module:
        """`module` as the `build_layer` hooks of all plugins return it."""
        wrapped: torch.nn.Module = self.registry.wrap_layer(module, LayerInfo(name, index, self.config))
        return wrapped

    def chosen(self) -> dict[str, str]:
        """Description of the context -> kernel name, for each choice; for the ModelReport and the fingerprint."""
        return {describe(resolution.context): resolution.chosen.name for resolution in self.resolutions}

    @property
    def buffers(self) -> int:
        """Bytes that the chosen kernels keep for exchanges between ranks."""
        kept: dict[str, int] = {}
        for resolution in self.resolutions:
            kept.update(resolution.chosen.buffers)
        return sum(kept.values())

    def bind(self, resolution: Resolution) -> Any:
        """Make the chosen kernel."""
        return made(resolution.chosen, resolution.context)

    def _context(self, op: str, bucket: int, layout: str | None, granule: int, shape: Mapping[str, Any]) -> OpContext:
        return OpContext(
            op=op,
            device=self.device,
            dtype=self.config.dtype,
            layout=layout,
            granule=granule,
            bucket=bucket,
            shape=dict(shape),
            deterministic=self.deterministic,
            peers=self.mesh.peers.get(str(shape.get("group"))),
        )

    def _make(self, context: OpContext, given: Mapping[str, Op | tuple[Op, ...]]) -> Any:
        spec = self.registry.find(OpSpec, context.op)
        if given.keys() & set(spec.expands_to):
            return load(f"{spec.module}:expand")(context, self._part(context, given))
        resolution = resolve(candidates_for(self.registry, context.op), context, self.pins.kernels, self.order)
        self.resolutions.append(resolution)
        try:
            if spec.expands_to and resolution.chosen.name == REFERENCE:
                return load(f"{spec.module}:expand")(context, self._part(context, given))
            return self.bind(resolution)
        except LlmcoreError:
            raise
        except BaseException as error:
            reraise_if_stopping(error)
            name, plugin = resolution.chosen.name, resolution.plugin.name
            raise PluginError(
                f"kernel {name} of plugin {plugin!r} failed to build for {describe(context)}: "
                f"{type(error).__name__}: {error}; use another with --kernel {context.op}={REFERENCE}"
            ) from error

    def _part(self, whole: OpContext, given: Mapping[str, Op | tuple[Op, ...]]) -> Callable[..., Op]:
        def part(op: str, **shape: Any) -> Op:
            if (found := given.get(op)) is not None:
                return found[whole.bucket] if isinstance(found, tuple) else found
            return self._make(self._context(op, whole.bucket, whole.layout, whole.granule, shape), given)  # type: ignore[no-any-return]

        return part
