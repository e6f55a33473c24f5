"""From names in a checkpoint to parameters of a model."""
