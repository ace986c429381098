"""Names and messages are shown and never obeyed."""

import json

from omnicomp.safety.escapes import json_text, one_line, printable, shown

HOSTILE = "\x1b]0;pwn\x07\x9b31m \u202e \u2028 \ud800 \r\n::error::x"


def test_a_terminal_finds_nothing_to_obey() -> None:
    assert printable("a\x1b[2J\x9b\u202eb\ud800\nc") == "a\ufffd[2J\ufffd\ufffdb\ufffd\nc"
    assert one_line("a\r\nb") == "a\ufffd b"


def test_json_means_the_same_and_is_harmless() -> None:
    text = json_text({HOSTILE: [HOSTILE, "naïve", 3]})
    assert json.loads(text) == {HOSTILE: [HOSTILE, "naïve", 3]}
    assert "naïve" in text
    assert text.replace("\n", "").isprintable()


class Broken:
    def __str__(self) -> str:
        raise KeyError("x")


def test_a_value_that_can_not_be_shown_says_so() -> None:
    assert shown(Broken()) == "<Broken, which can't be shown: KeyError>"
