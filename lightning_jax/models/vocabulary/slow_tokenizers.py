"""Conversion of tokenizers that have no tokenizer.json, by transformers if it is installed.

transformers is imported when such a directory is loaded, and for nothing else. Its chat templates
are not used.
"""

from pathlib import Path

import tokenizers

from lightning_jax.models.model_files import ModelError
from lightning_jax.settings.loading import is_installed
from lightning_jax.system.text import in_one_line

# Files of vocabularies that transformers converts: SentencePiece, tiktoken, Mistral's tekken, BPE
# and WordPiece.
FILES = ("*.model", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt")
TIKTOKEN = "tiktoken.model"  # the only *.model that is never SentencePiece
INSTALL = "run pip install 'lightning-jax[tokenizers]'"


def convert(directory: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Return the tokenizer of a directory without tokenizer.json, and special tokens by name.

    The names are those that the files or transformers' class of the tokenizer give. Code in the
    directory never runs. Raises ModelError.
    """
    path = directory / "tokenizer.json"
    files = [file for pattern in FILES for file in sorted(directory.glob(pattern))]
    if not files:
        raise ModelError.missing(
            str(path),
            f"{directory} has no tokenizer.json and no vocabulary that could become one; copy the "
            "model's own files there",
        )
    is_sentencepiece = files[0].suffix == ".model" and files[0].name != TIKTOKEN
    needed = ("transformers", *(("sentencepiece",) if is_sentencepiece else ()))
    if absent := [package for package in needed if not is_installed(package)]:
        raise ModelError.not_installed(
            str(path),
            f"{directory} has no tokenizer.json, and converting {files[0].name} needs {absent[0]}; "
            f"{INSTALL}",
        )
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        backend = tokenizers.Tokenizer.from_str(converted.backend_tokenizer.to_str())
        special = {name: str(token) for name, token in converted.special_tokens_map.items()}
    except Exception as error:  # any, from files of any form
        raise ModelError.malformed(
            str(path),
            f"{directory} has no tokenizer.json, and transformers cannot convert {files[0].name} "
            f"({in_one_line(str(error))}); copy a tokenizer.json there",
        ) from error
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return backend, {name: text for name, text in special.items() if text in vocabulary}
