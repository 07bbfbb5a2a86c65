"""Train a small model by RL to search for facts before it answers.

The agent is agents/musique_rag.py, on the OpenAI Agents SDK. It searches paragraphs for one fact
after another, then answers. It calls the policy in this process. Its searches go to
agents/paragraph_search.py, a separate process that ends with this one. Training starts with
supervised steps on demonstrated searches, then runs GRPO on 0.9 * answer F1 + 0.1 * format.

    python experiments/musique.py --config experiments/configs/musique_cpu.yaml [key=value ...]

Without `data.root` the questions and their paragraphs are generated, about an invented world.
`data.root=DIR` reads MuSiQue as released (musique_ans_v1.0_train.jsonl and _dev.jsonl).
`search.retriever=dense` searches by meaning instead of words. docs/results.md has the results. The
same command resumes after a crash, and `run_dir=DIR` starts another run.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from data.musique import corpus_of, load_musique, read_corpus
from side_process import side_process

from lightning_jax.cli.train import cache_dir, load_splits, run_main, train_and_report
from lightning_jax.train.config import Config, SearchConfig
from lightning_jax.types import Task

SEARCH = Path(__file__).parents[1] / "agents" / "paragraph_search.py"


def main(config: Config) -> None:
    corpus = corpus_of(config.data.root, cache_dir(config))
    load = partial(load_musique, corpus=read_corpus(corpus))
    train_tasks, dev_tasks = load_splits(config, load)
    command = search_command(config.search, corpus, cache_dir(config))
    with side_process(command, start_timeout_s=config.search.start_timeout_s) as search:
        print(f"search: {config.search.retriever} over {corpus} at {search['url']}")
        train_and_report(
            config, _searching(train_tasks, search["url"]), _searching(dev_tasks, search["url"])
        )


def search_command(search: SearchConfig, corpus: Path, cache: Path) -> list[str]:
    """Return the search program and its arguments. By default the index is next to the data."""
    encoder = [Path(search.encoder).name] if search.retriever == "dense" else []
    name = "-".join(["index", corpus.parent.name, search.retriever, *encoder])
    index = search.index or cache / name
    return [
        *(str(SEARCH), "--corpus", str(corpus), "--index", str(index)),
        *("--retriever", search.retriever, "--encoder", search.encoder),
        *("--top-k", str(search.top_k), "--max-chars", str(search.max_chars), "--end-with-stdin"),
    ]


def _searching(tasks: Sequence[Task], url: str) -> list[Task]:
    return [task | {"search_url": url} for task in tasks]


if __name__ == "__main__":
    run_main(main, __doc__)
