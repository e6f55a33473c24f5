"""Public building blocks of model families. Call every layer as ``layer(x, step)``."""

from llmcore.layers.attention import Attention
from llmcore.layers.build import (
    AttentionKernels,
    Bound,
    Build,
    InputForm,
    LinearMethod,
    LinearShape,
    Rounded,
    Source,
    Unquantized,
    fill_normal,
)
from llmcore.layers.creation import ExpertsFor, MethodFor, create_linears
from llmcore.layers.decoder import Decoder, Hidden
from llmcore.layers.dense import (
    DenseConfig,
    dense_weights,
    read_dense,
    read_scoring,
    scoring_weights,
    windowed_groups,
)
from llmcore.layers.embedding import CappedHead, Embedding, LMHead, ScaledEmbedding, held_tokens
from llmcore.layers.layer import Layer
from llmcore.layers.layout import KV, Layout, zeros
from llmcore.layers.linear import Linear, MergedLinear, PairedQKV, QKVLinear, apart
from llmcore.layers.mesh import Mesh, tensor_parallel
from llmcore.layers.mlp import MLP, GatedMLP
from llmcore.layers.moe import (
    BoundExperts,
    ExpertMethod,
    ExpertShape,
    MoE,
    PlainExperts,
    expert_elements,
    expert_names,
)
from llmcore.layers.norm import LayerNorm, OffsetRMSNorm, RMSNorm
from llmcore.layers.partial import Partial
from llmcore.layers.rope import NoRope, Rope, RopeConfig, read_rope
from llmcore.layers.step import Bucketed, KVStep, Rows, Step
from llmcore.ops import DTYPES, Op, packed, packing
from llmcore.ops.attention import ReferenceAttention, attend, shape_of, spec_of, token_slots
from llmcore.ops.comm import Peers, over
from llmcore.ops.moe import Dispatched

__all__ = [
    "DTYPES",
    "KV",
    "MLP",
    "Attention",
    "AttentionKernels",
    "Bound",
    "BoundExperts",
    "Bucketed",
    "Build",
    "CappedHead",
    "Decoder",
    "DenseConfig",
    "Dispatched",
    "Embedding",
    "ExpertMethod",
    "ExpertShape",
    "ExpertsFor",
    "GatedMLP",
    "Hidden",
    "InputForm",
    "KVStep",
    "LMHead",
    "Layer",
    "LayerNorm",
    "Layout",
    "Linear",
    "LinearMethod",
    "LinearShape",
    "MergedLinear",
    "Mesh",
    "MethodFor",
    "MoE",
    "NoRope",
    "OffsetRMSNorm",
    "Op",
    "PairedQKV",
    "Partial",
    "Peers",
    "PlainExperts",
    "QKVLinear",
    "RMSNorm",
    "ReferenceAttention",
    "Rope",
    "RopeConfig",
    "Rounded",
    "Rows",
    "ScaledEmbedding",
    "Source",
    "Step",
    "Unquantized",
    "apart",
    "attend",
    "create_linears",
    "dense_weights",
    "expert_elements",
    "expert_names",
    "fill_normal",
    "held_tokens",
    "over",
    "packed",
    "packing",
    "read_dense",
    "read_rope",
    "read_scoring",
    "scoring_weights",
    "shape_of",
    "spec_of",
    "tensor_parallel",
    "token_slots",
    "windowed_groups",
    "zeros",
]
