"""Write the embedded sets calendar and calendar-held-out: sentences, each with its calendar entry as JSON.

    python -m docs.calendar_data

The held-out rows share no activity, person, day, time or place with the training rows, and every other one has one
of two sentence patterns that training never shows. A value is copied as it is said, without the capital of a sentence.
Most values combine words of two lists, so that new ones have words that training has shown: a model of 135M parameters
needs that, since a word has other tokens after a quotation mark than within a sentence."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import product

from modelwright.data.sources import EMBEDDED_DATASETS


def words(text: str) -> list[str]:
    """The words of a text, or its parts between commas."""
    return [part.strip() for part in text.split("," if "," in text else None)]


NAMES = words("""
Maria Ahmed Lucy Tom Priya Olga Kenji Fatima Carlos Ingrid Noah Amara Pavel Sofia Liam Yuki Hassan Elena Marcus
Chloe Diego Freya Omar Greta Samuel Nadia Viktor Rosa Ethan Leila Bruno Hanna Oscar Mina Felix Aisha Jonas Clara
Rafael Tessa Ivan Zara Peter Bianca Simon Ada Daniel Keiko Martin Esther Hugo Sam Stefan Naomi Grace Irene
""")
SURNAMES = words("""
Okafor Lindgren Moreau Castillo Novak Brennan Takeda Weber Haddad Fischer Silva Larsen Mbeki Kowalski Rossi
Patel Duarte Nystrom Farrell Yilmaz Becker Quinn Sato Vargas Holm Adeyemi Keller Marino Doyle Petrov Ashworth Bauer
Choudhury Dubois Eriksen Ferrari Grant Horvat Iqbal Jansen Khan Lopez Murphy Nakamura Olsen Pereira
""")
MEALS = words("lunch coffee dinner breakfast brunch tea supper drinks pizza ice-cream")
SKILLS = words("""
tennis golf chess yoga karate judo badminton cricket fencing rowing sailing skating swimming climbing pottery ballet
dance piano guitar violin choir drama poetry boxing algebra Spanish cooking knitting painting football
""")
LESSONS = words("practice training coaching tuition")
PROJECTS = words("""
budget website product sales staff tax travel wedding safety marathon roof thesis archive festival holiday newsletter
election software insurance exam
""")
WORK = words("planning preparation research paperwork")
STREETS = words("Harbour Mill Station Church Park Castle River Market Bridge Orchard Tower Abbey Canal Forest Oak Hill")
ADJECTIVES = words("Blue Golden Old Little Green Silver Red White Copper Crooked Velvet Amber Black Lazy Royal Happy")
VENUES = words("Heron Anchor Lantern Fox Kettle Pear Swan Acorn Owl Barrel Compass Rose Mill Lion Bakery Spoon")
PLACES = words("""
library, town hall, sports hall, city museum, main office, train station, community centre, clinic, village school,
boathouse, greenhouse, bus depot, harbour, theatre, bakery, art gallery, old barn, swimming pool, city park,
tea room, bookshop, post office, stadium, airport, castle, market square, concert hall, cinema, hotel bar, zoo,
ice rink, music school, corner shop, fire station, meeting room, lecture hall, studio
""")
WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
HOURS = words("one two three four five six seven eight nine ten eleven twelve")
VALUES: dict[str, Sequence[Sequence[str]]] = {
    "what": (
        [*MEALS, *SKILLS],
        [f"{meal} and {skill}" for meal, skill in product(MEALS, SKILLS)],
        [f"{skill} {lesson}" for skill, lesson in product(SKILLS, LESSONS)],
        [f"{project} {work}" for project, work in product(PROJECTS, WORK)],
    ),
    "who": (
        NAMES,
        [f"{first} {last}" for first, last in product(NAMES, SURNAMES)],
        [f"{title} {name}" for title, name in product(("Dr", "Mrs", "Mr", "Professor"), SURNAMES)],
    ),
    "day": (
        WEEKDAYS,
        [f"{day} {month}" for day, month in product(range(1, 29), MONTHS)],
    ),
    "time": (
        [f"{hour}:{minute}" for hour, minute in product(range(7, 22), range(10, 60, 5))],
        [f"{part} {hour}" for part, hour in product(("half past", "quarter past", "quarter to"), HOURS)],
        [f"{hour} {half}" for half, hours in (("am", range(7, 12)), ("pm", range(1, 10))) for hour in hours],
    ),
    "where": (
        [f"the {place}" for place in PLACES],
        [f"the {adjective} {venue}" for adjective, venue in product(ADJECTIVES, VENUES)],
        [f"{street} {kind}" for street, kind in product(STREETS, ("Street", "Road", "Square", "Gardens"))],
    ),
}
"""The values of each field, by kind: a kind is drawn first, then a value of it."""
PATTERNS = (
    "{what} with {who} on {day} at {time}, {where}.",
    "{what} with {who} at {where}, {day} at {time}.",
    "Please put {what} with {who} at {where} into my calendar for {day}, {time}.",
    "I am meeting {who} for {what} at {where} on {day} at {time}.",
    "On {day} at {time} I have {what} with {who} at {where}.",
    "I have {what} at {time} on {day} together with {who}, and it is at {where}.",
    "Don't forget: {day}, {time}, {what} with {who}, {where}.",
    "Can you note {what} at {where}? It is with {who}, {day} at {time}.",
    "{who} wanted to see me at {where} on {day} for {what}; let us say {time}.",
    "We agreed on {time} for {what} with {who}, on {day} at {where}.",
    "Book {where} for {what} with {who}: {day}, {time}.",
    "Remind me of {what} on {day}. {who} will be at {where} at {time}.",
    "At {where}, {day}, {time}: {what} with {who}.",
    "{time} on {day} works for {who}, so we do {what} then, at {where}.",
    "Yes, {day} is fine. See you at {where} at {time} for {what}, {who} said.",
    "There is {what} at {time}; {who} will expect me at {where} on {day}.",
    "{who} called and moved {what} to {day}, {time}, at {where}.",
    "Keep {day} free: at {time} I go to {where} with {who} for {what}.",
    "I promised {who} to come to {where} for {what}, {time} on {day}.",
    "{what}: {where}, {day}, {time}. {who} will come too.",
    "The place is {where} and the time is {time}: {what} with {who} on {day}.",
    "For {what} I meet {who} on {day}. We start at {time} at {where}.",
    "Let {who} know that {what} at {where} will begin at {time} on {day}.",
    "Could we do {what} on {day}? {who} will be at {where} from {time}.",
    "My plan for {day} is {what}, {time}, {where}, together with {who}.",
    "{day}, {time}: {who}, {what}, {where}.",
    "{who} will wait for me at {where} at {time} on {day}, for {what}.",
    "I would love to join {who} for {what} on {day}, so meet me at {time} in front of {where}.",
    "Good news: {who} found time for {what}! {day}, {time}, {where}.",
    "Add {what} to {day}: {time}, with {who}, {where}.",
    "From {time} on {day} I am at {where} for {what}; {who} invited me.",
    "Save the date, {day}! {who} will host {what} at {where} from {time}.",
    "{day} at {where}: {who} will lead {what} at {time}.",
    "Is {time} too early for {what} on {day}? {who} already booked {where}.",
    "I hope {time} is good for {who}, because {where} is ours on {day} for {what}.",
    "{who} told me that {where} is open on {day}, so we planned {what} for {time}.",
    "Meet {who} at {where} for {what}. The time is {time}, the day is {day}.",
    "{who} would like to do {what} with me, {day} if possible, and {time} is best; {where} is the place.",
    "Tell everyone: {where} is booked from {time} on {day}, and {who} will join us for {what}.",
)
HELD_OUT_PATTERNS = (
    "{who} asked whether {day} at {time} suits me for {what} at {where}, and I said yes.",
    "{day} is filling up: {what} with {who} at {time}, over at {where}.",
)
TRAIN_ROWS, HELD_OUT_ROWS = 192, 60


def calendar_rows(held_out: bool) -> Iterator[dict[str, str]]:
    """The rows of one of the two sets: a quarter of the values of every kind is only for held-out rows."""
    rng = random.Random(2026)
    values: dict[str, list[list[str]]] = {name: [] for name in VALUES}
    for name, kinds in VALUES.items():
        for kind in kinds:
            shuffled = rng.sample(kind, len(kind))
            reserved = max(2, len(kind) // 4)
            values[name].append(shuffled[:reserved] if held_out else shuffled[reserved:])
    rng = random.Random(2027) if held_out else rng
    for row in range(HELD_OUT_ROWS if held_out else TRAIN_ROWS):
        patterns = HELD_OUT_PATTERNS if held_out and row % 2 else PATTERNS
        pattern = patterns[row // (1 + held_out) % len(patterns)]
        entry = {name: rng.choice(rng.choice(kinds)) for name, kinds in values.items()}
        sentence = pattern.format(**entry)
        yield {"sentence": sentence[0].upper() + sentence[1:], "entry": json.dumps(entry, separators=(",", ":"))}


def main() -> None:
    """Write both files."""
    for name, held_out in (("calendar", False), ("calendar-held-out", True)):
        lines = (json.dumps(row) + "\n" for row in calendar_rows(held_out))
        EMBEDDED_DATASETS[name].write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
