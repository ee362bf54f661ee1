"""Mistakes that are the user's to mend: the command prints them as one line, without a traceback."""


class UserError(Exception):
    """A mistake in what was given. `exit_code` is the command's."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its name if it has none."""
    return (str(error).strip() or repr(error)).splitlines()[0]


class DataError(UserError):
    """A file or folder is missing, damaged or not what it should be."""


class UsageError(UserError):
    """The command line or a setting is wrong."""

    exit_code = 2
