"""Tries grammars in child processes (`trial`), and the messages to them."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from llmcore.api import RequestError
from llmcore.api.child_pool import ChildEnded, ChildPool, Limits, NoChild

from llmcore_guided import limits


@dataclass(frozen=True)
class Words:
    """The opening: the part of a vocabulary that grammars may name. `special`: its special tokens by id."""

    size: int
    eos_ids: tuple[int, ...]
    special: dict[int, str]


@dataclass(frozen=True)
class Question:
    """Asks whether this is a grammar."""

    args: str
    """The processor's arguments as JSON."""
    tags: dict[str, str | None]
    """A tag's text -> its special token (`grammars.TagRule`)."""
    closed: bool
    """Objects of schemas are closed."""


@dataclass(frozen=True)
class Answer:
    """`text`: the grammar for llguidance, or with `wrong` the mistake. `unenforced`: keywords of its schemas that the
    grammar does not enforce."""

    text: str = ""
    wrong: bool = False
    unenforced: tuple[str, ...] = field(default=())


class Trials:
    """Tries grammars, each in a child process that starts when it is needed. Any thread may use it."""

    def __init__(self, words: Words) -> None:
        self._pool = ChildPool("llmcore_guided.trial", msgspec.msgpack.encode(words))

    def warm(self) -> None:
        """Start one process."""
        self._pool.warm()

    def answer(self, question: Question) -> Answer:
        """A process's answer, or that it took too much. Raises RequestError (503) if the server is too busy."""
        seconds = limits.COMPILE_SECONDS
        most = Limits(seconds, limits.MEMORY_BYTES, limits.PATIENCE_SECONDS)
        try:
            answer = self._pool.answer(msgspec.msgpack.encode(question), most)
        except ChildEnded as error:
            if error.out_of_time:
                return Answer(f"it takes longer than {seconds:g} s to compile", wrong=True)
            return Answer("it is too deeply nested or needs too much memory to compile", wrong=True)
        except TimeoutError as error:
            raise _busy("the server is too busy to compile it") from error
        except NoChild as error:
            raise _busy("the process that compiles grammars does not start") from error
        return msgspec.msgpack.decode(answer, type=Answer)


def _busy(why: str) -> RequestError:
    return RequestError(f"{why}; send the request again", code="server_overloaded", status=503)
