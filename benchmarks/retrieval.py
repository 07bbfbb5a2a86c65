"""Measure the recall of paragraph search on the paragraphs that questions need.

    python benchmarks/retrieval.py --root DIR [--paragraphs 1500]

No model is involved. DIR is a directory that experiments/data/musique.py reads. Without it
the data is generated. The search of agents/musique_rag.py gets two kinds of queries: the whole
question, or each hop's own question with the earlier answers filled in, as a perfect agent would
ask. `--paragraphs` keeps the paragraphs that the dev questions need and adds random ones up to that
number. Embedding a whole corpus on a CPU takes long. Recall is over the dev questions' hops.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_jax.types import Task

sys.path.insert(0, str(Path(__file__).parents[1] / "agents"))
sys.path.insert(0, str(Path(__file__).parents[1] / "experiments" / "data"))
from musique import corpus_of, load_musique, read_corpus
from musique_rag import queries
from paragraph_index import RETRIEVERS, ParagraphIndex, open_index
from sentence_encoder import PACKAGED

COUNTS = (1, 2, 3, 5, 10)

# Queries of a task, each with the pids that it should find.
Asked = list[tuple[str, list[str]]]


def whole_question(task: Task) -> Asked:
    return [(task["question"], task["supporting"])]


def hop_questions(task: Task) -> Asked:
    questions = queries(task["decomposition"])
    return [(query, [pid]) for query, pid in zip(questions, task["supporting"], strict=True)]


def recall(
    index: ParagraphIndex, tasks: Sequence[Task], ask: Callable[[Task], Asked]
) -> dict[int, float]:
    """Return the share of needed paragraphs found, for each number of results per search."""
    hits = dict.fromkeys(COUNTS, 0)
    needed = 0
    for query, pids in (pair for task in tasks for pair in ask(task)):
        pids_found = [paragraph["pid"] for paragraph in index.search(query, max(COUNTS))]
        needed += len(pids)
        for count in COUNTS:
            hits[count] += sum(pid in pids_found[:count] for pid in pids)
    return {count: hit / needed for count, hit in hits.items()}


def write_subset(corpus: Path, tasks: Sequence[Task], number: int, target: Path) -> None:
    """Write a corpus of the paragraphs that the tasks need, with random others up to `number`."""
    paragraphs = read_corpus(corpus).by_pid
    needed = {pid for task in tasks for pid in task["supporting"]}
    others = sorted(paragraphs.keys() - needed)
    drawn = random.Random("distractors").sample(others, max(number - len(needed), 0))
    kept = [paragraph for pid, paragraph in paragraphs.items() if pid in needed | set(drawn)]
    target.write_text("".join(json.dumps(paragraph) + "\n" for paragraph in kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", help="a data folder; left out: the generated set")
    parser.add_argument("--paragraphs", type=int, help="left out: the whole corpus")
    parser.add_argument("--retrievers", nargs="+", choices=RETRIEVERS, default=list(RETRIEVERS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tasks, _ = load_musique(args.root, "dev", folder)
        corpus = corpus_of(args.root, folder)
        if args.paragraphs:
            write_subset(corpus, tasks, args.paragraphs, folder / "corpus.jsonl")
            corpus = folder / "corpus.jsonl"
        for retriever in args.retrievers:
            index = open_index(folder / retriever, corpus, retriever, PACKAGED)
            for ask in (whole_question, hop_questions):
                shares = recall(index, tasks, ask)
                cells = "  ".join(f"@{count} {share:.3f}" for count, share in shares.items())
                print(f"{retriever:5} {ask.__name__:14} {len(index)} paragraphs  {cells}")


if __name__ == "__main__":
    main()
