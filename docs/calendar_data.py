"""Write the embedded sets calendar and calendar-held-out: sentences, each with its calendar entry as JSON.

    python -m docs.calendar_data

The held-out rows share no activity, person, day, time or place with the training rows, and every other one has a
sentence pattern that training never shows. Values are copied as they are said: with 15 names, and times turned into 24
hours, the same training of a 135M model got 14 of 60 entries right; with these lists 56 (seed 42)."""

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
Rafael Tessa Ivan Zara Peter Bianca Simon Anouk Daniel Keiko Martin Esther Hugo Layla Stefan Naomi Victor Irene
Arthur Salma Walter Petra Joanna Tariq Wendy Emre Sunita Gustav Odile Kwame Ruth Andrei Molly Idris Camille Sven
Paula Rashid Agnes Dmitri Holly Mateo Judith Anders Nina Jamal Vera Lorenzo Alice Bilal Connie Edgar Farah George
Helga Isaac Jelena Karl Lydia Milan Noor Otto Philippa Quentin Rita Sergio Thea Umar Vivian William Xenia Yasmin
""")
SURNAMES = words("""
Okafor Lindgren Moreau Castillo Novak Brennan Takeda Weber Haddad Fischer Silva Larsen Mbeki Kowalski Rossi
Patel Duarte Nystrom Farrell Yilmaz Becker Quinn Sato Vargas Holm Adeyemi Keller Marino Doyle Petrov Ashworth Bauer
Choudhury Dubois Eriksen Ferrari Grant Horvat Iqbal Jansen Khan Lopez Murphy Nakamura Olsen Pereira
""")
KINDS = words("""
budget piano design chess garden safety staff yoga history music swimming product tax travel pottery drama
poetry science sales guitar wedding hiking cooking sailing thesis dance roof choir violin boxing algebra
marathon website archive museum theatre
""")
EVENTS = words("practice training planning coaching research shopping preparation homework")
MEALS = words("""
lunch coffee dinner breakfast brunch tea drinks supper tennis golf badminton karaoke bowling fishing skating
chess cards lemonade cycling croquet
""")
STREETS = words("""
Harbour Mill Station Church Park Castle River Market School Bridge Orchard Tower Garden Abbey Canal Forest Lake
Meadow Chapel Quarry
""")
ADJECTIVES = words("Blue Golden Old Little Green Silver Red White Copper Crooked Velvet Amber")
VENUES = words("Heron Anchor Lantern Fox Kettle Pear Swan Acorn Owl Barrel Compass Rose")
PLACES = words("""
library, town hall, sports hall, city museum, main office, train station, community centre, clinic,
village school, boathouse, greenhouse, bus depot, harbour, theatre, bakery, art gallery, old barn,
swimming pool
""")
WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
HOURS = words("one two three four five six seven eight nine ten eleven twelve")
VALUES: dict[str, Sequence[Sequence[str]]] = {
    "what": ([f"{kind} {event}" for kind, event in product(KINDS, EVENTS)], MEALS),
    "who": (
        NAMES,
        [f"{title} {name}" for title, name in product(("Dr", "Mrs", "Mr", "Professor"), SURNAMES)],
        [f"{first} and {second}" for first, second in product(NAMES, NAMES) if first < second],
    ),
    "day": (
        [f"{prefix}{day}" for prefix, day in product(("", "next "), WEEKDAYS)],
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
        [f"{number} {street} Street" for street, number in product(STREETS, range(2, 60, 5))],
    ),
}
"""The values of each field, by kind: a kind is drawn first, then a value of it."""
PATTERNS = (
    "{what} with {who} on {day} at {time}, {where}.",
    "Please put {what} with {who} at {where} into my calendar for {day}, {time}.",
    "I am meeting {who} for {what} at {where} on {day} at {time}.",
    "On {day} at {time} I have {what} with {who} at {where}.",
    "{who} and I have {what} at {time} on {day}, and it is at {where}.",
    "Don't forget: {day}, {time}, {what} with {who}, {where}.",
    "Can you note {what} at {where}? It is with {who}, {day} at {time}.",
    "{who} wants to see me at {where} on {day} for {what}; let us say {time}.",
    "We agreed on {time} for {what} with {who}, on {day} at {where}.",
    "Book {where} for {what} with {who}: {day}, {time}.",
    "Remind me of {what} on {day}. {who} will be at {where} at {time}.",
    "At {where}, {day}, {time}: {what} with {who}.",
    "{time} on {day} works for {who}, so {what} happens then, at {where}.",
    "Yes, {day} is fine. See you at {where} at {time} for {what}, {who} says.",
    "There is {what} at {time}; {who} expects me at {where} on {day}.",
    "{who} called: {what} was moved to {day}, {time}, and takes place at {where}.",
    "Keep {day} free: at {time} {who} and I go to {where} for {what}.",
    "I promised {who} to come to {where} for {what}, {time} on {day}.",
    "{what}: {where}, {day}, {time}. {who} comes too.",
    "The place is {where} and the time is {time}: {what} with {who} on {day}.",
    "For {what} I meet {who} on {day}. We start at {time} at {where}.",
    "Let {who} know that {what} at {where} begins at {time} on {day}.",
    "Could we do {what} on {day}? {who} is at {where} from {time}.",
    "My plan for {day} is {what}, {time}, {where}, together with {who}.",
)
HELD_OUT_PATTERNS = (
    "{who} asked whether {day} at {time} suits me for {what} at {where}, and I said yes.",
    "My {day} is filling up: {what} with {who} at {time}, over at {where}.",
    "Meet {who} at {where} for {what}. The time is {time}, the day is {day}.",
    "{who} would like to do {what} with me, {day} if possible, and {time} is best; {where} is the place.",
    "Tell everyone: {where} is booked from {time} on {day}, and {who} joins us for {what}.",
)
TRAIN_ROWS, HELD_OUT_ROWS = 240, 60


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
        entry = {name: rng.choice(rng.choice(kinds)) for name, kinds in values.items()}
        sentence = patterns[row // (1 + held_out) % len(patterns)].format(**entry)
        yield {"sentence": sentence[0].upper() + sentence[1:], "entry": json.dumps(entry)}


def main() -> None:
    """Write both files."""
    for name, held_out in (("calendar", False), ("calendar-held-out", True)):
        lines = (json.dumps(row) + "\n" for row in calendar_rows(held_out))
        EMBEDDED_DATASETS[name].write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
