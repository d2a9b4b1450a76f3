"""Counts the words of a text."""

import re


def words(text):
    """The words of a text, lower case, in order."""
    return text.lower().split()


def top(text, count=3):
    """The most frequent words with their counts; words as frequent as each other in the order of the alphabet."""
    counts = {}
    for word in words(text):
        counts[word] = counts.get(word, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])[:count]


def sentences(text):
    """The sentences of a text, without their ends."""
    return [part.strip() for part in re.split(r"[.!?]", text) if part.strip()]
