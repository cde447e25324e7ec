"""Every error that paceline raises on purpose: raised low, made an exit code once, by `cli/`.

A message says what was wrong, where (file, row, sample id, layer) and what to do next.
"""


class PacelineError(Exception):
    """The work failed or a check failed; what was already published is untouched."""

    exit_code = 1


class UsageError(PacelineError):
    """The request itself is wrong: an unknown option, a missing file, options at odds."""

    exit_code = 2


class DataError(PacelineError):
    """Conversations or token data cannot be used as they are."""


class TargetError(PacelineError):
    """The target model cannot be found, loaded or understood."""


class LayerError(TargetError):
    """Layer ids that the target does not have, or that a convention cannot say."""


class EngineError(PacelineError):
    """An inference engine failed, or gave something that its contract forbids."""


class CaptureMismatch(EngineError):
    """Captured rows do not belong to the sample that they were captured for."""


class ProbeFailure(EngineError):
    """The probe found that the engine's hidden states are wrong; nothing was stored."""


class StoreError(PacelineError):
    """A store of hidden states cannot be written or read."""


class StoreCorruption(StoreError):
    """A shard, an index or a manifest does not hold what its checksums say."""


class DiskFullError(StoreError):
    """The disk is, or would be, full; nothing published was lost."""


class StreamError(StoreError):
    """The other side of a stream died, left, or waits for something that this side must do."""


class LockedError(PacelineError):
    """Another run owns the folder."""


class FingerprintMismatch(PacelineError):
    """A folder was made from other inputs or with other options than those asked for now.

    advice: where starting over would help, how that is asked for; it ends the message.
    """

    def __init__(self, found: str, advice: str = "") -> None:
        super().__init__(f"{found}\n{advice}" if advice else found)
        self.found = found
        self.advice = advice


class VocabularyError(PacelineError):
    """A draft vocabulary that is impossible or does not fit its target."""


class TrainingError(PacelineError):
    """Training cannot go on: no supervised rows, a loss that is not finite, a broken checkpoint."""


class RankError(TrainingError):
    """Another rank of the training failed; its error is in the text."""


class EvaluationError(PacelineError):
    """An acceptance length cannot be measured on what was given."""


class ExportError(PacelineError):
    """The draft cannot be written for, or read from, the asked-for server."""
