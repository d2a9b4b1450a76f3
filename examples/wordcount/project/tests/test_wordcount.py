import wordcount

TEXT = "The cat saw the dog. The dog, it seems, saw the cat! Did it?"


def test_words_have_no_punctuation():
    assert wordcount.words("The dog, it seems.") == ["the", "dog", "it", "seems"]


def test_the_most_frequent_come_first():
    assert wordcount.top(TEXT, 1) == [("the", 4)]


def test_equals_are_in_alphabetical_order():
    assert wordcount.top(TEXT, 5) == [("the", 4), ("cat", 2), ("dog", 2), ("it", 2), ("saw", 2)]


def test_an_apostrophe_belongs_to_the_word():
    assert wordcount.words("don't") == ["don't"]


def test_sentences():
    assert len(wordcount.sentences(TEXT)) == 3
