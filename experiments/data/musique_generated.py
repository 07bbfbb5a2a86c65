"""Generated multi-hop questions about invented worlds, in the compact layout of musique.py.

They serve a first run without data: short paragraphs on invented people, towns, books and so on,
and questions that need two or three of them. Train and dev use two worlds that share no name, both
in one corpus. Dev questions thus have the same kinds, on entities that training has not seen.
"""

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataset_files import make_directory

VERSION = 1  # increase when the set changes, so that old cached copies are not read
NUM_QUESTIONS = {"train": 480, "dev": 120}


@dataclass(frozen=True)
class Relation:
    """Fact that each entity of kind `subject` has. `{}` is the subject, `{o}` the object."""

    subject: str
    object: str
    sentence: str  # sentence in the subject's paragraph
    noun: str  # description of the object
    questions: tuple[str, ...]


RELATIONS = (
    Relation("book", "person", "{} is a novel by {o}.", "the author of {}",
             ("Who wrote {}?", "Who is the author of {}?")),
    Relation("company", "person", "{} is a company that {o} founded.", "the founder of {}",
             ("Who founded {}?", "Who is the founder of {}?")),
    Relation("company", "town", "Its head office is in {o}.", "the town where {} has its office",
             ("Where is the head office of {}?", "In which town does {} have its office?")),
    Relation("person", "town", "{} was born in {o}.", "the birthplace of {}",
             ("Where was {} born?", "In which town was {} born?")),
    Relation("person", "person", "The teacher of {} was {o}.", "the teacher of {}",
             ("Who was the teacher of {}?", "Who taught {}?")),
    Relation("town", "region", "{} is a town in the region of {o}.", "the region of {}",
             ("In which region is {}?", "Which region does {} belong to?")),
    Relation("town", "river", "The river {o} runs through it.", "the river of {}",
             ("Which river runs through {}?", "What is the river of {}?")),
    Relation("region", "person", "{} is a region whose governor is {o}.", "the governor of {}",
             ("Who is the governor of {}?", "Who governs {}?")),
    Relation("region", "town", "Its capital is {o}.", "the capital of {}",
             ("What is the capital of {}?", "Which town is the capital of {}?")),
    Relation("river", "lake", "{} is a river that flows into {o}.", "the lake that {} flows into",
             ("Which lake does {} flow into?", "Into which lake does {} flow?")),
)  # fmt: skip
# Other sentences of a paragraph, so that not every sentence is a fact to ask about.
ASIDES = {
    "book": "It has {n} chapters.",
    "company": "It has {n} workers.",
    "person": "They lived to the age of {n}.",
    "town": "It has {n} streets.",
    "region": "It has {n} villages.",
    "river": "It is {n} miles long.",
    "lake": "{} is a lake that is {n} feet deep.",
}
COUNTS = {
    "book": 45, "company": 35, "person": 90, "town": 45, "region": 14, "river": 24, "lake": 12
}  # fmt: skip
_ONSETS = "b d f g h k l m n p r s t v z br dr gr kr st tr"
_VOWELS = "a e i o u"
_ENDS = "l m n r s rk nd th x"
_THINGS = "Lantern Orchard Harbour Ladder Winter Mirror Ferry Garden Clock Bridge"
_TRADES = "Tools Mills Glass Paper Ships Bells Salt Looms"


def generated_root(cache_dir: Path) -> Path:
    """Return the folder of the generated set, writing it if needed. Raises DatasetError."""
    return make_directory(cache_dir / f"generated-multihop-v{VERSION}", write_generated)


def write_generated(folder: Path) -> None:
    """Write corpus.jsonl.gz, train.jsonl.gz and dev.jsonl.gz into the folder."""
    names = _Names(random.Random("names of the generated worlds"))
    corpus: list[dict[str, str]] = []
    for split, number in NUM_QUESTIONS.items():
        rng = random.Random(f"world of {split}")
        world = World(names, rng)
        pids = {name: f"{split[0]}{index:04d}" for index, name in enumerate(world.kind_of)}
        corpus += [
            {"pid": pids[name], "title": name, "text": world.paragraph(name, rng)}
            for name in world.kind_of
        ]
        rows = [_row(split, i, hops, rng, pids) for i, hops in enumerate(world.select(number, rng))]
        _write(folder / f"{split}.jsonl.gz", rows)
    random.Random("order of the paragraphs").shuffle(corpus)
    _write(folder / "corpus.jsonl.gz", corpus)


@dataclass(frozen=True)
class Hop:
    """One fact in a question's chain."""

    subject: str
    relation: Relation
    object: str


class World:
    """Entities, each with one object per relation of its kind."""

    def __init__(self, names: "_Names", rng: random.Random) -> None:
        of_kind = {kind: [names.of(kind) for _ in range(n)] for kind, n in COUNTS.items()}
        self.kind_of = {name: kind for kind, members in of_kind.items() for name in members}
        self.facts: dict[str, list[Hop]] = {
            name: [
                Hop(name, relation, rng.choice([x for x in of_kind[relation.object] if x != name]))
                for relation in RELATIONS
                if relation.subject == kind
            ]
            for name, kind in self.kind_of.items()
        }

    def paragraph(self, name: str, rng: random.Random) -> str:
        facts = [hop.relation.sentence.format(name, o=hop.object) for hop in self.facts[name]]
        aside = ASIDES[self.kind_of[name]].format(name, n=rng.randrange(12, 99))
        return " ".join([*facts, aside])

    def select(self, number: int, rng: random.Random) -> list[tuple[Hop, ...]]:
        """Return equal numbers of two- and three-hop chains, with relations balanced."""
        chosen: list[tuple[Hop, ...]] = []
        for length in (2, 3):
            kinds: dict[tuple[Relation, ...], list[tuple[Hop, ...]]] = {}
            for name in self.kind_of:
                for chain in self.chains(name, length):
                    kinds.setdefault(tuple(hop.relation for hop in chain), []).append(chain)
            for chains in kinds.values():
                rng.shuffle(chains)
            picked: list[tuple[Hop, ...]] = []
            while len(picked) < number // 2:
                picked += [chains.pop() for chains in kinds.values() if chains]
            chosen += picked[: number // 2]
        rng.shuffle(chosen)
        return chosen

    def chains(self, name: str, length: int) -> Iterator[tuple[Hop, ...]]:
        """Yield the chains from an entity that visit no entity twice."""
        if length == 0:
            yield ()
            return
        for hop in self.facts[name]:
            for rest in self.chains(hop.object, length - 1):
                if name not in {name_ for link in rest for name_ in (link.subject, link.object)}:
                    yield (hop, *rest)


def _row(
    split: str, index: int, hops: tuple[Hop, ...], rng: random.Random, pids: dict[str, str]
) -> dict[str, Any]:
    """Return a question's record. The question nests the descriptions of its hops."""
    described = hops[0].subject
    for hop in hops[:-1]:
        described = hop.relation.noun.format(described)
    questions = [rng.choice(hop.relation.questions) for hop in hops]
    about = [hops[0].subject, *(f"#{number}" for number in range(1, len(hops)))]
    return {
        "id": f"{len(hops)}hop_generated_{split}_{index:03d}",
        "question": questions[-1].format(described),
        "answer": hops[-1].object,
        "answer_aliases": [],
        "hops": len(hops),
        "supporting": [pids[hop.subject] for hop in hops],
        "decomposition": [
            {"question": text.format(who), "answer": hop.object, "pid": pids[hop.subject]}
            for text, who, hop in zip(questions, about, hops, strict=True)
        ],
        "split": split,
    }


class _Names:
    """Generator of invented names from unique words."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._used: set[str] = set()

    def of(self, kind: str) -> str:
        word = self._word()
        match kind:
            case "person":
                return f"{self._word(1)} {word}"
            case "book":
                return f"{word}'s {self._one_of(_THINGS)}"
            case "company":
                return f"{word} {self._one_of(_TRADES)}"
            case "lake":
                return f"Lake {word}"
            case _:
                return word

    def _one_of(self, words: str) -> str:
        return self._rng.choice(words.split())

    def _word(self, syllables: int = 2) -> str:
        while True:
            parts = [self._one_of(_ONSETS) + self._one_of(_VOWELS) for _ in range(syllables)]
            word = ("".join(parts) + self._one_of(_ENDS)).capitalize()
            if syllables == 1:
                return word  # a first name may be shared
            if word not in self._used:
                self._used.add(word)
                return word


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))  # no timestamp, for reproducible bytes
