"""The one exception meant for people."""


class UserError(ValueError):
    """A mistake in config, data or checkpoint, told in one line with its remedy."""
