"""What can go wrong while a model is loaded.

ModelError (ValueError)
  +-- CheckpointError     files are missing, broken, or not what they claim to be
  +-- UnsupportedModel    the files are fine, but this engine cannot run them exactly
"""

from __future__ import annotations


class ModelError(ValueError):
    """A model cannot be loaded. The text names the field or file and what to do."""


class CheckpointError(ModelError):
    pass


class UnsupportedModel(ModelError):
    pass
