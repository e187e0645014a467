from wordcount import count_words, top_words


def test_words_are_counted_in_lower_case():
    assert count_words("Red green RED") == {"red": 2, "green": 1}


def test_punctuation_separates_words():
    assert count_words("red, green; red.") == {"red": 2, "green": 1}


def test_an_empty_text_has_no_words():
    assert count_words(" \n") == {}


def test_top_words_breaks_ties_by_name():
    assert top_words({"b": 1, "a": 1, "c": 2}, 2) == [("c", 2), ("a", 1)]
