"""A checkpoint format: a folder with config.json and one .npy file per tensor."""

import json
from pathlib import Path

import numpy as np
from llmcore.api import WeightLoaderSpec, hookimpl


@hookimpl
def register_weight_loaders():
    yield WeightLoaderSpec(name="npy", sniff=f"{__name__}:sniff", open=f"{__name__}:NpyCheckpoint")


def sniff(path: Path) -> bool:
    """Must be cheap. It looks for files and reads nothing."""
    return path.is_dir() and any(path.glob("*.npy"))


class NpyCheckpoint:
    """protocols.Checkpoint."""

    def __init__(self, path: Path):
        self.path = path

    def config(self):
        return json.loads((self.path / "config.json").read_text())

    def generation_config(self):
        return {}

    def sizes(self):
        headers = ((file.stem, np.load(file, mmap_mode="r")) for file in sorted(self.path.glob("*.npy")))
        return {name: (array.shape, {"float32": "F32", "float16": "F16"}[array.dtype.name]) for name, array in headers}

    def tensors(self):
        import torch

        for file in sorted(self.path.glob("*.npy")):
            yield file.stem, lambda file=file: torch.from_numpy(np.load(file))
