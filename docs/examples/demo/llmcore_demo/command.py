"""`llmcore parameters MODEL_DIR`: counts the parameters of a safetensors checkpoint from its headers."""

import json
import math
from pathlib import Path

import click


@click.command()
@click.argument("model_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
def command(model_dir):
    """Count a model's parameters."""
    total = 0
    for file in sorted(model_dir.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    click.echo(f"{total:,} parameters")
