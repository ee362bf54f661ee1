"""A parallel corpus that needs no download: dates, times, quantities, prices and lists, said in any two languages.

The words and patterns come from CLDR (https://cldr.unicode.org) through Babel. Every phrase starts as a meaning, such
as "7 March 1985, the long format", and is said once in each language, so both lines mean the same by construction.
"""

import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import babel.dates
from babel import Locale, UnknownLocaleError
from babel.dates import format_date, format_interval, format_time, format_timedelta
from babel.lists import format_list
from babel.numbers import format_currency
from babel.units import format_unit

Say = Callable[..., str]  # a meaning: say(locale=...) is its text in that language

COUNTRIES = "AR AT AU BE BR CA CH CL CN CO DE DK EG ES FI FR GB GR IE IN IR IT JP KE MA MX NG NL PE PL PT SE".split()
LANGUAGES = "ar bg cs da de el en es et fa fi fr he hi hu id it ja ko lt lv nl pl pt ro ru sv sw th tr uk vi zh".split()
CURRENCIES = "EUR USD GBP JPY CHF BRL INR SEK MXN CAD".split()
UNITS = (
    "length-meter length-kilometer length-mile length-centimeter mass-kilogram mass-gram volume-liter "
    "duration-hour duration-minute duration-day speed-kilometer-per-hour temperature-celsius"
).split()
SECONDS = {"minute": 60, "hour": 3600, "day": 86400, "week": 604800, "month": 2592000, "year": 31536000}  # as Babel's
WEIGHTS = {"date": 6, "time": 3, "date interval": 4, "time interval": 2, "unit": 5, "currency": 3, "symbol": 3}
WEIGHTS |= {"future": 0.5, "past": 0.5, "country": 4, "language": 3, "month": 1}
FIRST_DAY, LAST_DAY = date(1970, 1, 1), date(2029, 12, 31)  # under 100 years: a year of two digits stays clear
LONGEST = 90  # characters in a line
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # tab, and all that ends a line


def word(item: tuple[str, Any], locale: Locale) -> str | None:
    """The name of ("country", "DE"), ("language", "de") or ("month", 3); None where CLDR has no name for it."""
    kind, code = item
    names = {"country": locale.territories, "language": locale.languages, "month": locale.months["stand-alone"]["wide"]}
    return names[kind].get(code)


def word_list(items: list[tuple[str, Any]], style: str, locale: Locale) -> str:
    """The names of the items, joined by the language's "and" (style "standard") or "or"."""
    return format_list([word(item, locale) for item in items], style, locale=locale)


def quantity(item: tuple[str, str], value: int | Decimal, locale: Locale) -> str | None:
    """So many of ("unit", "mass-gram"), ("symbol", "EUR"), ("currency", "EUR"), ("future", "day") or ("past", "day").

    None where CLDR has no name for the currency.
    """
    kind, name = item
    if kind == "unit":
        return format_unit(value, name, locale=locale)
    if kind in ("currency", "symbol") and name not in locale.currencies:
        return None
    if kind == "symbol":
        return format_currency(value, name, locale=locale)
    if kind == "currency":  # without currency_digits=False, Babel says "5.00 euros"
        return format_currency(value, name, locale=locale, format_type="name", currency_digits=False)
    seconds = int(value) * SECONDS[name] * (1 if kind == "future" else -1)
    # An endless threshold keeps 90 minutes from turning into 2 hours.
    return format_timedelta(seconds, name, threshold=float("inf"), add_direction=True, locale=locale)


def usable(items: Iterable[Any], say: Callable[..., str | None], source: Locale, target: Locale) -> list[Any]:
    """The items that both languages can name; of items with one name in the source language, the first."""
    by_name: dict[str, Any] = {}
    for item in items:
        try:
            names = say(item, locale=source), say(item, locale=target)
        except (LookupError, ValueError):  # Babel's answer to a unit, field or style that the language lacks
            continue
        if all(names):
            by_name.setdefault(names[0], item)
    return list(by_name.values())


def fields(pattern: str) -> set[str]:
    """What a date or time pattern shows: y, M, d, E (weekday), clock, half (of the day), m, s."""
    same = {"h": "clock", "K": "clock", "H": "clock half", "k": "clock half", "a": "half", "b": "half", "B": "half"}
    same |= {"L": "M", "c": "E", "e": "E", "Y": "y", "u": "y", "G": ""}  # the era is the same for all our dates
    letters = [value[0] for kind, value in babel.dates.tokenize_pattern(pattern) if kind == "field"]
    return {field for letter in letters for field in same.get(letter, letter).split()}


def vocabulary(source: Locale, target: Locale) -> dict[str, list[Any]]:
    """For each kind of phrase, the formats, skeleton or items that it can be made of in this pair of languages."""

    def formats(names: list[str], patterns: str, say: Callable[..., str]) -> list[str]:
        # The source must show all that the target shows: a weekday, say, cannot be guessed.
        has, wants = ({n: fields(getattr(locale, patterns)[n].pattern) for n in names} for locale in (source, target))
        return usable([name for name in names if wants[name] <= has[name]], say, source, target)

    measures = {"unit": UNITS, "currency": CURRENCIES, "symbol": CURRENCIES, "future": SECONDS, "past": SECONDS}
    items = [(kind, name) for kind, names in measures.items() for name in names]
    words: list[tuple[str, Any]] = [("country", code) for code in COUNTRIES] + [
        ("language", code) for code in LANGUAGES
    ]
    words += [("month", number) for number in range(1, 13)]
    made_of: dict[str, list[Any]] = {
        "date": formats(["full", "long", "medium"], "date_formats", partial(format_date, date(1985, 3, 7))),
        "time": formats(["short", "medium"], "time_formats", partial(format_time, time(15, 5))),
        "date interval": ["yMMMd"],  # skeletons that every locale has
        "time interval": ["Hm"],
        "style": usable(["standard", "or"], partial(format_list, ["A", "B"]), source, target),
    }
    for item in usable(items, partial(quantity, value=5), source, target) + usable(words, word, source, target):
        made_of.setdefault(item[0], []).append(item)
    return made_of


def draw(kind: str, made_of: dict[str, list[Any]], rng: random.Random) -> tuple[Any, int | Decimal, list[Say]]:
    """A random meaning of this kind: its item, its number, and the ways to say it (all formats of one date)."""
    day = FIRST_DAY + timedelta(days=rng.randrange((LAST_DAY - FIRST_DAY).days - 400))  # an interval ends in time, too
    if kind == "date":
        return kind, 0, [partial(format_date, day, name) for name in made_of[kind]]
    if kind == "time":
        moment = time(rng.randrange(24), rng.randrange(60), rng.randrange(60))
        return kind, 0, [partial(format_time, moment, name) for name in made_of[kind]]
    if kind == "date interval":
        end = day + timedelta(days=rng.randint(1, rng.choice((20, 400))))
        return kind, 0, [partial(format_interval, day, end, name) for name in made_of[kind]]
    if kind == "time interval":
        start, stop = (time(n // 12, n % 12 * 5) for n in sorted(rng.sample(range(288), 2)))  # steps of 5 minutes
        return kind, 0, [partial(format_interval, start, stop, name) for name in made_of[kind]]
    if kind in ("country", "language", "month"):
        some = rng.sample(made_of[kind], min(rng.choice((2, 3)), len(made_of[kind])))
        return kind, 0, [partial(word_list, some, rng.choice(made_of["style"]))]
    value: int | Decimal = rng.randint(1, rng.choice((30, 120 if kind in ("future", "past") else 999)))
    if kind == "symbol":
        value = Decimal(rng.randint(1, 99999)) / 100
    elif kind == "unit" and rng.random() < 0.5:
        value = Decimal(rng.randint(1, 999)) / 10
    item = rng.choice(made_of[kind])
    return item, value, [partial(quantity, item, value)]


def parse_locale(name: str) -> Locale:
    """The locale called `name` ("pt", "zh_Hans" or "zh-Hans"); ValueError where CLDR has none."""
    try:
        return Locale.parse(name.replace("-", "_"))
    except (UnknownLocaleError, ValueError):
        raise ValueError(f"unknown locale {name!r}: expected one of CLDR, such as 'en', 'pt_BR' or 'zh_Hans'") from None


def phrasebook(
    source_locale: str, target_locale: str, seed: int = 1, pairs: int = 24000
) -> dict[str, list[tuple[str, str]]]:
    """Sentence pairs (source text, target text) under "train", "dev" and "test"; the same seed gives the same pairs.

    At most `pairs` pairs in all; dev and test take a tenth each, but at most 500. No source text occurs twice, and one
    with two right answers does not occur at all. Lines are NFC, have 1 to 90 characters and no control characters.

    Raises ValueError for an unknown locale, for twice the same locale and for fewer than 100 pairs.
    """
    source, target = parse_locale(source_locale), parse_locale(target_locale)
    if source == target:
        raise ValueError(f"source and target locale are both {source_locale!r}: expected two, such as 'en' and 'de'")
    if pairs < 100:
        raise ValueError(f"pairs is {pairs}: expected 100 or more, such as 24000")
    rng = random.Random(seed)
    made_of = vocabulary(source, target)
    weights = {kind: weight for kind, weight in WEIGHTS.items() if made_of.get(kind)}
    answers: dict[str, set[str]] = {}
    chosen: dict[str, tuple[str, Any]] = {}  # source text: (target text, key)
    for kind in rng.choices(list(weights), list(weights.values()), k=4 * pairs):  # some meanings come twice
        item, value, sayings = draw(kind, made_of, rng)
        lines = [[unicodedata.normalize("NFC", say(locale=locale)) for locale in (source, target)] for say in sayings]
        # All formats of a date count here: "May 7, 1985" is the long and the medium one, two formats in German.
        for text, answer in lines:
            answers.setdefault(text, set()).add(answer)
        text, answer = rng.choice(lines)
        if all(line.strip() and len(line) <= LONGEST and not CONTROL.search(line) for line in (text, answer)):
            chosen[text] = answer, (item, source.plural_form(value), target.plural_form(value))
        for text, _ in lines:
            if len(answers[text]) > 1:
                chosen.pop(text, None)
        if len(chosen) == pairs:
            break
    texts = list(chosen)
    rng.shuffle(texts)
    # "1 gram" is the only line with "gram", as an Arabic dual has one line: an item and plural form with few lines
    # stays in train, for nothing else could teach it.
    count = Counter(key for _, key in chosen.values())
    taught = [text for text in texts if count[chosen[text][1]] > len(texts) // 1000]
    size = min(500, len(texts) // 10)
    held = set(taught[: 2 * size])
    train = [text for text in texts if text not in held]
    parts = {"train": train, "dev": taught[:size], "test": taught[size : 2 * size]}
    return {part: [(text, chosen[text][0]) for text in lines] for part, lines in parts.items()}
