import pytest

from wordcount import render


def test_counts_stand_in_a_column():
    assert render([("a", 2), ("long", 1)]) == "a     2\nlong  1"


@pytest.mark.parametrize("rows", [[], ()], ids=["list", "tuple"])
def test_no_words_give_an_empty_report(rows):
    assert render(rows) == ""
