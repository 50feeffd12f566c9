"""Every error spmdlab raises on purpose.  Anything else that escapes is a bug."""


class SpmdlabError(Exception):
    """Base class, so a launch script can catch what the user can fix."""


class ConfigError(SpmdlabError, ValueError):
    """The configuration contradicts itself or names something unknown."""


class ShardingError(SpmdlabError, ValueError):
    """An array cannot be laid out on the mesh the way the strategy asks."""


class TargetError(SpmdlabError, ValueError):
    """A target does not exist, or its devices cannot be had in this process."""


class RunError(SpmdlabError, RuntimeError):
    """A training run ended before it was done, for no fault of its configuration."""


class HloError(SpmdlabError, ValueError):
    """HLO text has a form the parser does not know."""


class CompileError(SpmdlabError, RuntimeError):
    """XLA refused to compile the step."""


class DoesNotFit(CompileError):
    """The compiled step needs more memory than a device has."""

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: float | None = None,
        capacity_bytes: float | None = None,
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        """Bytes per device the program needs; None where the compiler does not say."""
        self.capacity_bytes = capacity_bytes
        """Bytes per device a program may use; None where the compiler does not say."""
