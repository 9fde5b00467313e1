"""The one exception meant for people."""


class UserError(ValueError):
    """A mistake in config, data or checkpoint: one line with its remedy."""


def require(ok: bool, key: str, value: object, remedy: str) -> None:
    """Refuse a setting.

    Args:
        ok: Whether it is right.
        key: Its full name in a config.
        value: What was given.
        remedy: What it may be.

    Raises:
        UserError: If it is not.
    """
    if not ok:
        raise UserError(f"{key} = {value}: {remedy}")
