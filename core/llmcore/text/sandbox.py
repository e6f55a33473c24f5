"""The Jinja environment of chat templates. A template reaches neither Python's internals nor past a render's `Budget`.

It compiles templates as Jinja does, and adds a call of the budget to each loop, call, concatenation, slice, comparison
and new container. `sandbox_calls` has the filters, tests and methods. The most frequent lookups (members of dicts,
`loop` and namespaces) are faster than Jinja's, which makes up for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, MacroRef
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Joiner

from llmcore.text.render_budget import TURN, Budget, Kept, attributes_of
from llmcore.text.sandbox_calls import (
    FILTERS,
    GLOBALS,
    OPERATORS,
    TESTS,
    BoundFormat,
    Function,
    call_format,
    call_function,
    call_method,
    compared,
    contains,
)

_OF_DICTS = frozenset(dir(dict))
_OF_LOOPS = frozenset(
    {
        *("index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"),
        *("previtem", "nextitem", "cycle", "changed"),
    }
)
_DIRECT: Mapping[type, Callable[[Budget, Any, Any, Any], Any]] = {
    BuiltinMethodType: call_method,
    MethodType: call_method,
    BoundFormat: call_format,
    Function: call_function,
}
_COMPARISONS = {
    **{"eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<="},
    **{"in": "in", "notin": "not in"},
}


class BudgetedContext(Context):
    """A template's variables, with the budget of their render."""

    budget: Budget

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        """See Jinja's Context. The derived context has the same budget."""
        made: Any = super().derived(locals)
        made.budget = self.budget
        return made  # type: ignore[no-any-return]


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training. In serving it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Code(CodeGenerator):
    """Jinja's code generator, with calls of `budget` added."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loops: list[str] = []
        """The first line of the body, for each loop around the current node."""
        self._entry = ""
        """The first line of the next function."""

    def write_commons(self) -> None:
        """Write the beginning of a template's function."""
        super().write_commons()
        self.writeline("budget = context.budget")
        self.writeline("concat = budget.concat")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        """Write a loop whose turns free what they made, unless a buffer or a macro's closure keeps it."""
        stays = frame.buffer is not None or node.recursive or (node.find(nodes.Macro) or node.find(nodes.CallBlock))
        if stays:
            pieces = sum(len(output.nodes) for output in node.find_all(nodes.Output))
            macros = sum(1 for _ in node.find_all((nodes.Macro, nodes.CallBlock)))
            self._loops.append(f"budget.copied({16 + 64 * pieces + 1000 * macros}, {_work(node)})")
        else:
            held = self.temporary_identifier()
            self.writeline(f"{held} = budget.held")
            self._loops.append(f"budget.turn({held}, {_work(node)})")
        if node.test is not None:
            self._entry = f"fiter = budget.ticking(fiter, {_work(node.test)})"
        super().visit_For(node, frame)
        self._loops.pop()

    def enter_frame(self, frame: Frame) -> None:
        """Write the first line of a frame. The first frame of a loop is its filter, if it has one, then its body."""
        super().enter_frame(frame)
        if self._entry:
            self.writeline(self._entry)
            self._entry = ""
        elif frame.loop_frame:
            self.writeline(self._loops[-1])

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> tuple[Frame, MacroRef]:
        """Write a macro that counts the work of its body in each call."""
        self._entry = f"budget.spend({_work(node)})"
        return super().macro_body(node, frame)

    def visit_Block(self, node: nodes.Block, frame: Frame) -> None:
        """Write a block. The caller of the template counts its pieces, so a block inside a buffer is refused."""
        if frame.buffer is not None:
            self.fail("a block inside a macro or a set block is not supported", node.lineno)
        super().visit_Block(node, frame)

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier, frame: Frame) -> None:
        """Refuse `{% autoescape %}`, which is for HTML."""
        self.fail("autoescape is not supported", node.lineno)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("(piece if (piece := (")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")).__class__ is str else budget.text(piece))")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        """Write `a + b + c` as one call."""
        terms: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            terms.append(left.right)
            left = left.left
        terms.append(left)
        self._call("add", frame, *reversed(terms))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Write `a ~ b` as one call."""
        self._call("join", frame, *node.nodes)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """Write a comparison. One with a constant stays plain, because its work is limited by the constant's size."""
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        names = [operand.op for operand in node.ops]
        if all(
            _constant(right) or (_constant(left) and name not in ("in", "notin"))
            for left, right, name in zip(sides, sides[1:], names, strict=False)
        ):
            self.write("(")
            self._side(node.expr, frame)
            for operand in node.ops:
                self.write(f" {_COMPARISONS[operand.op]} ")
                self._side(operand.expr, frame)
            self.write(")")
            return
        if names == ["in"] or names == ["notin"]:
            self.write(f"({'not ' if names == ['notin'] else ''}environment.has(budget, ")
            self.visit(sides[1], frame)
            self.write(", ")
            self.visit(sides[0], frame)
            self.write("))")
            return
        self.write("environment.compare(budget, ")
        self.visit(node.expr, frame)
        for operand in node.ops:
            self.write(f", {_COMPARISONS[operand.op]!r}, ")
            self.visit(operand.expr, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """Write a slice as a call, because it makes a new value and Jinja does not pass it through the environment."""
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        none = nodes.Const(None)
        self._call("cut", frame, node.node, *(at or none for at in (node.arg.start, node.arg.stop, node.arg.step)))

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        """Write a new list."""
        self.write("budget.compose(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        """Write a new tuple, or the names into which a tuple is unpacked."""
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("budget.compose(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """Write a new dict. Its keys are checked before they are hashed."""
        self.write("budget.compose({")
        for pair in node.items:
            self._call("key", frame, pair.key)
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("})")

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        """Write a constant. Jinja also makes constants of lists whose members are constants."""
        container = isinstance(node.value, (list, tuple, dict))
        self.write("budget.compose(" if container else "")
        super().visit_Const(node, frame)
        self.write(")" if container else "")

    def _side(self, node: nodes.Expr, frame: Frame) -> None:
        """Write one side of a comparison. A container is not counted there, because it is dropped at once."""
        if isinstance(node, nodes.List):
            super().visit_List(node, frame)
        elif isinstance(node, nodes.Tuple):
            super().visit_Tuple(node, frame)
        else:
            self.visit(node, frame)

    def _call(self, name: str, frame: Frame, *arguments: nodes.Expr) -> None:
        self.write(f"budget.{name}(")
        for argument in arguments:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")


def _work(node: nodes.Node) -> int:
    """The work of running the code of `node` once."""
    return max(TURN, TURN // 4 * sum(1 for _ in node.find_all(nodes.Node)))


def _constant(node: nodes.Node) -> bool:
    if isinstance(node, (nodes.Tuple, nodes.List)):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)


class Sandbox(ImmutableSandboxedEnvironment):
    """The Jinja environment that chat templates expect, with limits."""

    code_generator_class = _Code
    context_class = BudgetedContext
    intercepted_binops = frozenset(OPERATORS) | {"+"}

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters = dict(FILTERS)
        self.tests = dict(TESTS)
        self.globals = dict(GLOBALS)

    def pieces(self, template: Any, variables: Mapping[str, Any], budget: Budget) -> Iterator[str]:
        """The pieces of the prompt that `template` writes. The caller counts their memory."""
        budget.given(variables)
        context = template.new_context(variables)
        context.budget = budget
        pieces: Iterator[str] = template.root_render_func(context)
        return pieces

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See Jinja's SandboxedEnvironment."""
        budget: Budget = context.budget  # type: ignore[attr-defined]
        return OPERATORS[operator](budget, left, right)

    def compare(self, budget: Budget, left: Any, *rest: Any) -> bool:
        """The result of `a < b < c`; `rest` has the operators between the values."""
        for operator, right in zip(rest[::2], rest[1::2], strict=True):
            if not compared(budget, operator, left, right):
                return False
            left = right
        return True

    def has(self, budget: Budget, where: Any, what: Any) -> bool:
        """The result of `what in where`."""
        if where.__class__ is str:
            budget.spend(len(where))
            return what in where
        if where.__class__ is list and what.__class__ is str and len(where) < 64 and len(what) < 64:
            return what in where
        return contains(budget, where, what)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """See Jinja's Environment; with shortcuts for the most frequent lookups."""
        kind = obj.__class__
        if kind is dict:
            if attribute not in _OF_DICTS:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif kind is LoopContext:
            if attribute in _OF_LOOPS:
                return getattr(obj, attribute)
        elif kind is Kept and attribute[:1] != "_":
            try:
                return attributes_of(obj)[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """See Jinja's Environment. A container is not accepted as a key: its hash or its text may take too long."""
        if obj.__class__ is dict and argument.__class__ is str:
            try:
                return obj[argument]
            except KeyError:
                if argument not in _OF_DICTS:
                    return self.undefined(obj=obj, name=argument)
        elif argument.__class__ is not str and not isinstance(argument, (str, int, float, slice)):
            return self.undefined(obj=obj, name="of this type")
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Any:
        """See Jinja's SandboxedEnvironment; for `str.format` and `str.format_map`."""
        return BoundFormat.of(self, value)

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """See Jinja's Environment. A template may call macros, the environment's functions, and known methods."""
        budget: Budget = context.budget  # type: ignore[attr-defined]
        kind = callee.__class__
        if kind is Macro:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            held = budget.held
            if callee.catch_varargs or callee.catch_kwargs:
                budget.composed = True
                budget.hold(100 * (len(args) + len(kwargs)))
            return budget.left(held, callee(context.eval_ctx, *args, **kwargs))
        budget.spend()
        if kind in _DIRECT:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return _DIRECT[kind](budget, callee, args, kwargs)
        if kind is LoopContext:
            held = budget.held
            return budget.left(held, context.call(callee, *args, **kwargs))
        if kind is Joiner or isinstance(callee, Undefined) or not callable(callee):
            return context.call(callee, *args, **kwargs)
        raise SecurityError(f"{_name_of(callee)} cannot be called in a chat template")


def _name_of(callee: Any) -> str:
    if isinstance(callee, (BlockReference, TemplateReference)):
        return "a block"
    return str(getattr(callee, "__name__", type(callee).__name__))
