# pyright: reportMissingImports=false, reportPrivateImportUsage=false
"""Script that writes the arrays for test_peft_format.py, and checks one of our exports.

Run it in a separate environment, because the project does not use torch:

    pip install torch==2.15.0 transformers==5.23.0 peft accelerate safetensors numpy
    python tests/models/golden/make_peft_golden.py
    python tests/models/golden/make_peft_golden.py MODEL_DIR ADAPTER_DIR LOGITS.npz

The first command takes the random checkpoints of two families from make_golden.py. It writes
adapters in peft's format and the logits of checkpoint and adapters together. The second command
prints how much peft's logits for an exported adapter differ from ours, given `tokens` and `logits`.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen2": ["q_proj", "down_proj"],
}


def make(family: str) -> None:
    torch.manual_seed(len(family))
    golden = dict(np.load(HERE / f"{family}.npz"))
    tokens = torch.tensor(golden.pop("tokens")).long()
    golden.pop("logits")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(HERE / f"{family}.json"))
    state = {name: torch.tensor(array) for name, array in golden.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    config = LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS[family], task_type="CAUSAL_LM")
    adapted = get_peft_model(model.eval(), config).eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(0.3 * torch.randn(weight.shape))
        logits = adapted(tokens).logits
    with tempfile.TemporaryDirectory() as folder:
        adapted.save_pretrained(folder)
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
        fields = json.loads((Path(folder) / "adapter_config.json").read_text())
    fields["target_modules"] = sorted(fields["target_modules"])
    del fields["base_model_name_or_path"]  # a path on the machine that ran this
    (HERE / f"peft_{family}.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    np.savez_compressed(
        HERE / f"peft_{family}.npz",
        **{name: tensor.numpy() for name, tensor in tensors.items()},
        logits=logits[:, ::15].numpy().astype(np.float32),
    )


def check(model_dir: str, adapter_dir: str, ours: str) -> None:
    arrays = np.load(ours)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokens = torch.tensor(arrays["tokens"]).long()
    with torch.no_grad():
        plain = base(tokens).logits.numpy()
        theirs = PeftModel.from_pretrained(base, adapter_dir).eval()(tokens).logits.numpy()
    change, difference = np.abs(theirs - plain).max(), np.abs(theirs - arrays["logits"]).max()
    sys.stdout.write(f"adapters change logits by {change:.3g}, ours are off by {difference:.3g}\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        check(*sys.argv[1:])
    else:
        for name in TARGETS:
            make(name)
