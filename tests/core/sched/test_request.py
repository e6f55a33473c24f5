"""Requests, their choices, the queue, and a rule: only transitions write what is counted of a request."""

from __future__ import annotations

import ast

import numpy as np
import pytest
from llmcore.api import Prompt, Submit
from llmcore.sched.request import Choice, Request, RequestTable, WaitingQueue
from source import CORE, parsed

COUNTERS = {
    *("status", "epoch", "length", "known", "computed", "settled", "prefill", "taken", "entered", "foreseen", "forks"),
    *("row", "produced", "queued_at", "untried", "ended"),
}
"""What a request's transitions count: columns of RequestTable, and attributes of Choice."""


def choice(arrival: int, n: int = 1) -> Choice:
    prompt = Prompt.of([1, 2])
    return Request.of(Submit(id=arrival, prompt=prompt, max_new_tokens=3, n=n), 0, arrival).choices[0]


def test_those_sent_back_go_first_oldest_first() -> None:
    queue = WaitingQueue()
    choices = [choice(i) for i in range(5)]
    for fresh in choices[2:]:
        queue.append(fresh)
    queue.give_back(choices[1])
    queue.give_back(choices[0])
    assert [one.arrival for one in queue] == [0, 1, 2, 3, 4]
    queue.remove(choices[1])
    queue.remove(choices[3])
    assert ([one.arrival for one in queue], len(queue)) == ([0, 2, 4], 3)
    with pytest.raises(KeyError):
        queue.remove(choices[3])


def test_a_choice_knows_its_tokens_and_its_forks_run_where_they_were_reserved() -> None:
    table, one = RequestTable(4, 10), choice(0, n=3)
    assert (one.places, one.size, one.tokens().tolist()) == (3, 2, [1, 2])
    table.admit(one, 0)
    assert (one.row, table.forking, table.places) == (0, {0: [1, 2]}, 1)
    assert table.enqueue(table.running(), *np.array([[2], [1]], np.int32)).tolist() == [0]
    second, third = table.fork(one)
    assert [(twin.number, twin.row, twin.arrival, twin.places, twin.size) for twin in (second, third)] == [
        (1, 1, 1, 1, 2),
        (2, 2, 2, 1, 2),
    ]
    assert (one.places, list(one.request.choices)) == (1, [0, 1, 2])
    assert table.running().tolist() == [0, 1, 2] and table.tokens[2, :2].tolist() == [1, 2]
    one.produced = np.array([9], np.int32)
    assert (one.size, one.content().tolist(), one.content().dtype) == (3, [1, 2, 9], np.int64)


def written(node: ast.AST) -> list[ast.expr]:
    """The targets of an assignment, one by one."""
    if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For)):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]


def writes(source: ast.AST) -> list[tuple[int, str]]:
    """(line, counter) of every assignment to a counter of another object, or to a part of it."""
    found = []
    for node in ast.walk(source):
        for target in written(node):
            place = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(place, ast.Attribute) and place.attr in COUNTERS:
                own = isinstance(place.value, ast.Name) and place.value.id == "self" and target is place
                found += [] if own else [(target.lineno, place.attr)]
    return found


def test_only_its_transitions_write_what_is_counted_of_a_request() -> None:
    wrong = [
        f"{file.name}:{line} writes {name}"
        for file in sorted((CORE / "sched").glob("*.py"))
        if file.name != "request.py"
        for line, name in writes(parsed(file))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "table.length[rows] += 1",
        "self._table.known[row] = table.length[row] = 3",
        "choice.row = 4",
        "a, choice.ended = 1, True",
        "step.epoch[1]: int = 2",
    ],
)
def test_the_rule_can_fail(line: str) -> None:
    assert writes(ast.parse(line))
