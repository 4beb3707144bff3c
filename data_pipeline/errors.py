"""What can go wrong with text data, as the commands report it."""


class DataError(Exception):
    """The corpus, the vocabulary or the cached ids cannot be used.

    The message is one line: what was wrong, what was expected, how to mend it.
    """

    exit_code = 3
