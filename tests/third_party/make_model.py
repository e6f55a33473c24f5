"""A small random model of an architecture, with a tokenizer and a chat template: make_model.py FOLDER ARCHITECTURE."""

import sys
from pathlib import Path

from llmcore_devtools.family import small_model
from llmcore_devtools.tokenizer import write_tokenizer
from tokenizers import Tokenizer

folder = write_tokenizer(Path(sys.argv[1]))
template = folder / "chat_template.jinja"
# tools that a template leaves out are refused
template.write_text("{% for tool in tools or () %}{{ tool | tojson }}\n{% endfor %}" + template.read_text())
words = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
sizes = {"vocab_size": words, "hidden_size": 32, "max_position_embeddings": 512}
small_model(sys.argv[2], **heads, **sizes).save_pretrained(folder)
