"""The exception and the warning that are written for the person at the keyboard."""


class MtplxError(Exception):
    """A failure the user can act on.

    The message is a single line that says what is wrong, where, and what to do about it. The
    command line prints it on stderr and exits with 1; in Python it is an ordinary exception.
    """


class MtplxWarning(UserWarning):
    """Something that the user should know and that stops nothing, in a single line.

    The command line prints it on stderr as a note.
    """
