"""What the author of a dialect, a tokenizer or a parser may use of text. No torch."""

from llmcore.text.companions import Companions, read_companions
from llmcore.text.detokenizer import Detokenizer, detokenizer
from llmcore.text.stops import StopMatcher, StopStrings
from llmcore.text.stream import ChoiceText, TextRules
from llmcore.text.templates import RESERVED as RESERVED_TEMPLATE_VARIABLES
from llmcore.text.templates import ChatTemplate
from llmcore.text.tokenizer import FastTokenizer, load_tokenizer

__all__ = [
    "RESERVED_TEMPLATE_VARIABLES",
    "ChatTemplate",
    "ChoiceText",
    "Companions",
    "Detokenizer",
    "FastTokenizer",
    "StopMatcher",
    "StopStrings",
    "TextRules",
    "detokenizer",
    "load_tokenizer",
    "read_companions",
]
