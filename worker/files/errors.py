"""Why a model cannot be loaded. Imports nothing heavy.

ModelError (ValueError)
  +-- CheckpointError     files are missing, broken, or not what they claim to be
  +-- UnsupportedModel    the files are fine, but this engine cannot run them exactly
"""

from __future__ import annotations


class ModelError(ValueError):
    """A model that cannot be loaded. The text names the field or file and what to do."""


class CheckpointError(ModelError):
    """Files that are missing, broken, or not what they claim to be."""


class UnsupportedModel(ModelError):
    """Sound files of a model that this engine cannot run exactly."""


def encoder_error(model_type: str) -> UnsupportedModel:
    """Return the error for a model whose tokens attend to later ones."""
    return UnsupportedModel(
        f"model type {model_type!r} is an encoder, and only decoders (causal models) run here, for embeddings too"
    )
