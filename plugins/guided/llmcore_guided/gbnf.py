"""Translates GBNF (EBNF with ::=) to Lark, in time proportional to the text."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator

from llguidance.gbnf_to_lark import ASTNode, GbnfToLarkError, GrammarParser, RuleNode, RuleRefNode, resolve

_LARK = re.compile(r"^\s*(%llguidance\b|[?!]*start\s*(\.-?\d+)?\s*:(?!:=))", re.MULTILINE)
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def is_gbnf(text: str) -> bool:
    """True for GBNF, False for Lark. Raises ValueError for other texts."""
    if _LARK.search(text):
        return False
    if _GBNF.search(text):
        return True
    raise ValueError("the grammar is neither Lark, which has a rule start, nor GBNF, which has a rule root with ::=")


def as_lark(text: str) -> str:
    """Returns the grammar in Lark. Raises ValueError for a mistake in it."""
    try:
        rules = GrammarParser().parse(text)
        _find_terminals(rules)
        resolve(rules)
    except GbnfToLarkError as error:
        line, column = text.count("\n", 0, error.pos.pos) + 1, error.pos.pos - text.rfind("\n", 0, error.pos.pos)
        raise ValueError(f"line {line}, column {column}: {str(error).rpartition(' at line ')[0]}") from error
    except RecursionError as error:
        raise ValueError("it is too deeply nested") from error
    except Exception as error:  # the translator raises bare Exceptions
        raise ValueError(str(error)) from error
    return "%llguidance {}\n" + "\n".join(map(str, sorted(rules.values(), key=lambda rule: rule.order)))


def _find_terminals(rules: dict[str, RuleNode]) -> None:
    """Mark the rules that refer to terminals only. The translator's own `resolve` does the same in quadratic time."""
    wanted = {name: {ref.name for ref in _references(rule)} for name, rule in rules.items()}
    users: dict[str, list[str]] = defaultdict(list)
    for name, refs in wanted.items():
        for ref in refs:
            users[ref].append(name)
    left = {name: len(refs) for name, refs in wanted.items()}
    found = deque(name for name, count in left.items() if not count and name != "root")
    while found:
        name = found.popleft()
        rules[name].rule_is_terminal = True
        for user in users[name]:
            left[user] -= 1
            if not left[user] and user != "root":
                found.append(user)


def _references(rule: ASTNode) -> Iterator[RuleRefNode]:
    left = list(rule.children())
    while left:
        node = left.pop()
        left += node.children()
        if isinstance(node, RuleRefNode):
            yield node
