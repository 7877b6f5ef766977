"""One exception for what a person can mend, so that expected failures end in one line and exit code 2."""


class Refusal(Exception):
    """The run cannot go on as asked; the message is one line: what is wrong, where, and the mend."""


def last_line(error: BaseException) -> str:
    """The reason in a message of many lines: checks of a configuration name the value last."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
