"""Fixtures: agents on the import path, like when started by hand, and a database."""

import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

AGENTS = Path(__file__).parents[2] / "agents"
sys.path.insert(0, str(AGENTS))


@pytest.fixture
def task(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "pets?.sqlite"  # a name that a URI must quote
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            """
            CREATE TABLE owner (owner_id INTEGER PRIMARY KEY, city TEXT);
            CREATE TABLE pet (pet_id INTEGER PRIMARY KEY, name TEXT, kind TEXT, age REAL,
                              owner_id INTEGER REFERENCES owner(owner_id));
            INSERT INTO owner VALUES (1, 'Oslo'), (2, 'Rome');
            INSERT INTO pet VALUES (1, 'Rex', 'dog', 3, 1), (2, 'Tom', 'cat', 7.5, 1),
                                   (3, 'Ace', 'dog', 5, 2), (4, 'Kit', 'cat', NULL, 2);
            """
        )
    return {
        "id": "pets_0",
        "db_id": "pets",
        "question": "What are the names of the dogs?",
        "query": "SELECT name FROM pet WHERE kind = 'dog'",
        "db_path": str(path),
        "schema": "owner(owner_id, city)\npet(pet_id, name, kind, age, owner_id)\n"
        "Keys: pet.owner_id=owner.owner_id",
    }
