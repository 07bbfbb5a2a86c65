"""Train a small model by RL to search for facts before it answers.

The agent is agents/musique_rag.py, on the OpenAI Agents SDK. It searches paragraphs for one fact
after another, then answers. It calls the policy in this process. Its searches go to
agents/paragraph_search.py, a separate process that ends with this one. Training starts with
supervised steps on demonstrated searches, then runs GRPO on 0.9 * answer F1 + 0.1 * format.

    python experiments/musique.py --config experiments/configs/musique_cpu.yaml [key=value ...]

Without `data.root` the questions and their paragraphs are generated, about an invented world.
`data.root=DIR` reads MuSiQue as released (musique_ans_v1.0_train.jsonl and _dev.jsonl).
`data.options.search.retriever=dense` searches by meaning instead of words. The results are in
docs/results/musique.md. The same command resumes after a crash, and `run_dir=DIR` starts another
run.
"""

import sys

from lightning_jax.cli.main import main

LOAD = "data.load=experiments/data/musique.py:load_with_search"

if __name__ == "__main__":
    sys.exit(main(["train", LOAD, *sys.argv[1:]]))
