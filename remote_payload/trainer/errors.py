"""One exception for what a person can mend, so that expected failures end in one line and exit code 2."""


class Refusal(Exception):
    """The run cannot go on as asked; the message is one line: what is wrong, where, and the mend."""
