"""What can go wrong with text data, as the commands report it."""


class DataError(Exception):
    """The corpus, the vocabulary or the cached ids cannot be used.

    The message is one line: what was wrong, what was expected, how to mend it.
    """

    exit_code = 3


class UsageError(DataError):
    """The flags that name the corpus do not fit together."""

    exit_code = 2
