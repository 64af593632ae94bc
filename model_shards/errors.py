"""What can be wrong with a model or its weights. Knows nothing of requests or HTTP.

ModelError (ValueError)
 |- UnsupportedModel     an architecture or setting that we do not run
 |- CheckpointError      a file that is missing, truncated, corrupt or does not fit its config
 |- PartitionError       a cut that cannot be made
 `- ModelSourceError     a model that cannot be found or fetched
"""


class ModelError(ValueError):
    """Base of all errors that a model, its files or its cut can cause."""


class UnsupportedModel(ModelError):
    """The architecture, or one of its settings, is not supported; the message names it."""


class CheckpointError(ModelError):
    """A weight file is missing, incomplete, corrupt or mismatched; the message names file and tensor."""


class PartitionError(ModelError):
    """A tensor cannot be cut over that many ranks; the message has the numbers."""


class ModelSourceError(ModelError):
    """A model name does not resolve to local files; the message says what was tried."""
