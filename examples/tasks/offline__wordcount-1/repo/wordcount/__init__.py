"""Counts the words of a text."""

from wordcount.counting import count_words, top_words
from wordcount.report import render

__all__ = ["count_words", "render", "top_words"]
