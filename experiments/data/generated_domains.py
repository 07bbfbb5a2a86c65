"""Small worlds of the generated task set: the names and contents of their tables.

A world has three tables. The second and third refer to the first. A table has a label (a text that
names the row), one category (a text shared by rows) and one or two numbers. Numbers are distinct
across rows, so that orders and extremes have one answer. Questions use the column names, with
spaces for underscores.
"""

from dataclasses import dataclass

PEOPLE = (
    "Ada Amir Anna Boris Carla Chen Clara David Elena Emil Farid Fiona Gita Hugo Ines Ivan Jana "
    "Jorge Karim Laila Leo Lucia Marco Maria Nadia Nina Noah Olga Omar Paula Pedro Rosa Samir "
    "Sara Tomas Vera Viktor Wanda Yusuf Zoe"
)
CITIES = (
    "Athens Berlin Boston Cairo Dublin Geneva Hanoi Lagos Lima Lisbon London Madrid Milan "
    "Moscow Oslo Paris Porto Prague Quito Rome Seoul Sofia Tokyo Vienna Warsaw Zurich"
)
COUNTRIES = (
    "Brazil Canada Chile China Egypt France Ghana India Italy Japan Kenya Mexico Norway Peru Spain"
)
THINGS = (
    "Amber Anchor Arrow Beacon Bridge Candle Castle Cedar Comet Copper Crystal Desert Eagle "
    "Ember Falcon Forest Garden Glacier Harbor Island Jasmine Lantern Lotus Maple Marble Meadow "
    "Meteor Mirror Ocean Orchid Pearl Phoenix Prairie River Saffron Shadow Silver Summit "
    "Thunder Velvet Willow Winter"
)


@dataclass(frozen=True)
class Table:
    name: str
    plural: str
    label: tuple[str, str]  # column, and words to sample without replacement
    category: tuple[str, str]  # column, and words to sample from
    numbers: tuple[tuple[str, int, int], ...]  # column, smallest, largest
    num_rows: int


@dataclass(frozen=True)
class World:
    db_id: str
    split: str
    parent: Table
    children: tuple[Table, Table]


def columns_of(world: World, table: Table) -> list[tuple[str, str]]:
    """Return names and SQLite types of the table's columns."""
    foreign: list[tuple[str, str]] = (
        [] if table is world.parent else [(f"{world.parent.name}_id", "INTEGER")]
    )
    texts = [(table.label[0], "TEXT"), (table.category[0], "TEXT")]
    numbers = [(name, "INTEGER") for name, _, _ in table.numbers]
    return [(f"{table.name}_id", "INTEGER"), *texts, *numbers, *foreign]


def _world(db_id: str, split: str, *tables: str) -> World:
    """Build a world from table lines.

    A line is `name/plural rows | label words | category words | number low high`.
    """
    parent, *children = map(_table, tables)
    return World(db_id, split, parent, (children[0], children[1]))


def _table(text: str) -> Table:
    head, label, category, *numbers = (part.split() for part in text.split("|"))
    name, plural = head[0].split("/")
    words = {"PEOPLE": PEOPLE, "CITIES": CITIES, "COUNTRIES": COUNTRIES, "THINGS": THINGS}
    return Table(
        name,
        plural,
        (label[0], words[label[1]]),
        (category[0], " ".join(words.get(word, word) for word in category[1:])),
        tuple((column, int(low), int(high)) for column, low, high in numbers),
        int(head[1]),
    )


WORLDS = (
    _world(
        "football",
        "train",
        "team/teams 10 | city CITIES | league North South East | founding_year 1880 1990",
        "player/players 36 | name PEOPLE | position keeper defender winger striker | goals 0 99",
        "coach/coaches 14 | name PEOPLE | country COUNTRIES | salary 40 150 | age 30 75",
    ),
    _world(
        "library",
        "train",
        "author/authors 12 | name PEOPLE | country COUNTRIES | birth_year 1900 1995",
        "book/books 36 | title THINGS | genre novel poetry history | pages 80 700 | price 5 60",
        "prize/prizes 16 | title THINGS | kind national regional world | year 1950 2020",
    ),
    _world(
        "hospital",
        "train",
        "doctor/doctors 12 | name PEOPLE | specialty heart skin eye | salary 60 200",
        "patient/patients 36 | name PEOPLE | blood_type A B AB O | age 1 95 | weight 40 120",
        "visit/visits 24 | code THINGS | reason checkup surgery vaccine | cost 20 900",
    ),
    _world(
        "music",
        "train",
        "band/bands 10 | name THINGS | country COUNTRIES | members 2 20",
        "song/songs 36 | title THINGS | mood happy calm sad loud | length 90 420 | plays 100 9000",
        "concert/concerts 18 | city CITIES | season spring summer winter | visitors 200 5000",
    ),
    _world(
        "airport",
        "train",
        "airline/airlines 10 | name THINGS | country COUNTRIES | fleet_size 5 90",
        "flight/flights 24 | destination CITIES | class economy business first | distance 200 9000",
        "pilot/pilots 30 | name PEOPLE | rank captain officer trainee | hours 100 8000 | age 22 64",
    ),
    _world(
        "school",
        "train",
        "teacher/teachers 12 | name PEOPLE | subject math art music physics | age 25 66",
        "student/students 36 | name PEOPLE | grade A B C D | height 120 199 | absences 0 60",
        "club/clubs 14 | title THINGS | day monday tuesday friday | members 5 60",
    ),
    _world(
        "farm",
        "train",
        "farmer/farmers 10 | name PEOPLE | region valley hill coast | acres 10 400",
        "animal/animals 36 | name THINGS | species cow goat sheep horse | weight 20 900 | age 1 60",
        "field/fields 18 | name THINGS | crop wheat corn rice beans | yield 10 300",
    ),
    _world(
        "museum",
        "train",
        "museum/museums 10 | city CITIES | style modern classic royal | rooms 5 80",
        "painting/paintings 36 | title THINGS | paint oil ink chalk | year 1500 1990 | value 1 99",
        "guide/guides 18 | name PEOPLE | language french english arabic | tours 10 400",
    ),
    _world(
        "restaurant",
        "train",
        "chef/chefs 10 | name PEOPLE | country COUNTRIES | awards 0 40",
        "dish/dishes 36 | name THINGS | course starter main dessert | price 3 70 | salt 1 90",
        "waiter/waiters 18 | name PEOPLE | shift morning evening night | tips 20 600",
    ),
    _world(
        "cinema",
        "train",
        "director/directors 12 | name PEOPLE | country COUNTRIES | films 1 50",
        "movie/movies 36 | title THINGS | genre drama comedy horror | length 70 220 | budget 1 300",
        "actor/actors 24 | name PEOPLE | role hero villain extra | age 18 90",
    ),
    _world(
        "shop",
        "train",
        "store/stores 10 | city CITIES | size small medium large | revenue 50 900",
        "product/products 36 | name THINGS | color red blue black | price 2 400 | stock 0 300",
        "clerk/clerks 20 | name PEOPLE | department toys food books | wage 10 60",
    ),
    _world(
        "shipping",
        "train",
        "port/ports 10 | city CITIES | country COUNTRIES | docks 2 60",
        "ship/ships 30 | name THINGS | type tanker ferry cruiser | length 40 400 | crew 5 200",
        "sailor/sailors 30 | name PEOPLE | duty engineer cook navigator | voyages 1 120",
    ),
    _world(
        "zoo",
        "dev",
        "keeper/keepers 10 | name PEOPLE | shift early late night | experience 1 40",
        "animal/animals 36 | name THINGS | habitat forest desert ocean | weight 1 950 | age 1 70",
        "cage/cages 16 | name THINGS | material steel glass wood | area 10 500",
    ),
    _world(
        "company",
        "dev",
        "office/offices 10 | city CITIES | country COUNTRIES | floors 1 50",
        "employee/employees 36 | name PEOPLE | job lawyer clerk analyst | salary 30 99 | age 20 66",
        "project/projects 20 | title THINGS | status planned active closed | budget 10 800",
    ),
    _world(
        "hotel",
        "dev",
        "hotel/hotels 10 | city CITIES | category budget standard luxury | floors 2 40",
        "guest/guests 36 | name PEOPLE | country COUNTRIES | nights 1 60 | spending 50 2000",
        "cook/cooks 18 | name PEOPLE | meal breakfast lunch dinner | wage 10 70",
    ),
)
