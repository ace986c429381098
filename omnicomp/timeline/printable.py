"""Names from a user's program, made safe to show: none of them moves a terminal's cursor or breaks a line."""

__all__ = ["one_line", "printable"]


def printable(text: object) -> str:
    """Text in which control characters, and those that turn its direction, are replaced; line ends stay."""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in str(text))


def one_line(text: object) -> str:
    """The same with blanks for line ends."""
    return " ".join(printable(text).split("\n"))
