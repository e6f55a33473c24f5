"""`llmcore card MODEL_DIR`: what a model directory says of its model."""

import json
from pathlib import Path

import click


@click.command()
@click.argument("model_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
def command(model_dir):
    """Describe the model in MODEL_DIR."""
    config = json.loads((model_dir / "config.json").read_text())
    click.echo(f"architecture: {', '.join(config['architectures'])}")
    for name in ("num_hidden_layers", "hidden_size", "max_position_embeddings"):
        click.echo(f"{name}: {config.get(name, 'unknown')}")
