"""The built-in corpus: right by hand, no leaks between parts, nothing ambiguous, the same everywhere."""

import os
import subprocess
import sys
import unicodedata
from datetime import date, time
from functools import cache, partial

import pytest
from babel import Locale
from babel.dates import format_date, format_interval, format_time
from babel.localedata import locale_identifiers

from keras_transformer.data import phrasebook as module
from keras_transformer.data.phrasebook import fields, phrasebook, quantity, usable, vocabulary, word_list

corpus = cache(phrasebook)
EN, DE = Locale.parse("en"), Locale.parse("de")
DAY = date(1985, 3, 7)
HAND_MADE = [
    (partial(format_date, DAY, "full"), "Thursday, March 7, 1985", "Donnerstag, 7. März 1985"),
    (partial(format_date, DAY, "medium"), "Mar 7, 1985", "07.03.1985"),
    (partial(format_time, time(15, 5), "short"), "3:05\u202fPM", "15:05"),
    (partial(format_interval, DAY, date(1985, 3, 9), "yMMMd"), "Mar 7\u2009–\u20099, 1985", "7.–9. März 1985"),
    (partial(quantity, ("unit", "duration-hour"), 1), "1 hour", "1 Stunde"),
    (partial(quantity, ("unit", "length-mile"), 12), "12 miles", "12 Meilen"),
    (partial(quantity, ("currency", "CHF"), 12), "12 Swiss francs", "12 Schweizer Franken"),
    (partial(quantity, ("symbol", "EUR"), 12), "€12.00", "12,00\xa0€"),
    (partial(quantity, ("past", "day"), 3), "3 days ago", "vor 3 Tagen"),
    (partial(quantity, ("future", "minute"), 90), "in 90 minutes", "in 90 Minuten"),
    (partial(word_list, [("country", "FR"), ("language", "de")], "or"), "France or German", "Frankreich oder Deutsch"),
    (partial(word_list, [("month", 12), ("month", 1)], "standard"), "December and January", "Dezember und Januar"),
]


@pytest.mark.parametrize(("say", "english", "german"), HAND_MADE)
def test_says_what_english_and_german_say(say, english, german):
    assert (say(locale=EN), say(locale=DE)) == (english, german)


def test_fields_see_through_the_letters():
    """A clock of 24 hours shows the half of the day too; quoted words are no fields."""
    assert fields("EEEE, d 'de' MMMM y G") == {"E", "d", "M", "y"}
    assert fields("HH:mm") == fields("h:mm a") == {"clock", "half", "m"}
    assert fields("h:mm") == {"clock", "m"}


def test_usable_leaves_out_unnamed_and_indistinct_items():
    """German has no name for b and knows no d; c has the English name of a."""
    names = {"en": {"a": "one", "b": "two", "c": "one", "d": "four"}, "de": {"a": "eins", "b": None, "c": "drei"}}
    assert usable("abcd", lambda item, locale: names[locale.language][item], EN, DE) == ["a"]


def test_long_and_medium_date_are_one_in_chinese():
    assert vocabulary(EN, DE)["date"] == ["full", "long", "medium"]
    assert vocabulary(Locale.parse("zh_Hans"), EN)["date"] == ["full", "long"]


@pytest.mark.parametrize(
    "pair", [("en", "de"), ("en", "pt"), ("fr", "de"), ("en", "ja"), ("en", "zh_Hans"), ("de", "ar")]
)
def test_corpus_is_clean(pair):
    """Every source stands once in all parts together; lines are NFC, of 1 to 90 characters, none of them control."""
    parts = corpus(*pair)
    assert {name: len(part) for name, part in parts.items()} == {"train": 23000, "dev": 500, "test": 500}
    pairs = [pair for part in parts.values() for pair in part]
    assert len({source for source, _ in pairs}) == len(pairs)
    for line in (line for pair in pairs for line in pair):
        assert line.strip() and len(line) <= 90 and line.splitlines() == [line]
        assert unicodedata.is_normalized("NFC", line)
        assert "Cc" not in map(unicodedata.category, line)


def test_ambiguous_source_is_dropped():
    """The date "May 7, 1985" is "7. Mai 1985" or "07.05.1985", so no part has the like; March is safe."""
    sources = [source for part in corpus("en", "de").values() for source, _ in part if "–" not in source]
    assert not [source for source in sources if source.startswith("May ") and source[4].isdigit()]
    assert [source for source in sources if source.startswith("March ") and source[6].isdigit()]


def test_rare_forms_stay_in_train():
    """No line but "1 gram" has the word "gram", so a test line with it would ask for what was never taught."""
    singular = {"1 gram", "1 krona", "1 liter", "in 1 week"}
    train, dev, test = ({source for source, _ in part} for part in corpus("en", "de").values())
    assert singular & train and not singular & (dev | test)


def test_same_seed_same_pairs_in_every_process():
    """Python's hash seed changes nothing; the corpus's own seed does."""
    code = "import runpy, sys; print(ascii(runpy.run_path(sys.argv[1])['phrasebook']('en', 'fr', 1, 500)))"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        printed = subprocess.check_output([sys.executable, "-c", code, module.__file__], env=environment, text=True)
        assert printed.strip() == ascii(phrasebook("en", "fr", 1, 500))
    assert phrasebook("en", "fr", 1, 500) != phrasebook("en", "fr", 7, 500)


@pytest.mark.parametrize(
    "language", sorted(name for name in locale_identifiers() if len(name) < 4 and name != "en")[::20]
)
def test_languages_far_and_wide(language):
    """Every twentieth language of CLDR, as source and as target."""
    for source, target in ((language, "en"), ("en", language)):
        assert [len(part) for part in phrasebook(source, target, pairs=300).values()] == [240, 30, 30]


def test_errors_name_the_culprit():
    for arguments, message in [
        (("klingon", "de"), "'klingon'.*such as 'en'"),
        (("pt-BR", "pt_BR"), "both 'pt-BR'"),
        (("en", "de", 1, 50), "pairs is 50"),
    ]:
        with pytest.raises(ValueError, match=message):
            phrasebook(*arguments)
