"""Everything must run without the compiled kernels of Mamba and attention, which need CUDA to install."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tiny

BLOCKED = """
import sys
for name in ("mamba_ssm", "causal_conv1d", "flash_attn", "fla"):
    sys.modules[name] = None
import gna_utils
from gna_utils.tasks import Example
prompts = ["w1 w2 w3 w4 w1", "w5 w6 w5"]
examples = [Example("pairs", prompt, (" w2", " w6"), i, (), None, {}) for i, prompt in enumerate(prompts)]
for folder in sys.argv[1:]:
    model = gna_utils.load(folder, device="cpu")
    scores = gna_utils.score(model, examples)
    assert len(scores.frame) == 2, folder
    table = gna_utils.layers(model)
    head, kind = [(table[0].layer, 0)], table[0].kind
    assert gna_utils.transfer_matrix(model, prompts, head, mixer=kind).shape[:2] == (2, 1)
    assert gna_utils.patch(model, head, prompts, prompts[::-1], "query", mixer=kind).isfinite().all()
    with gna_utils.ablate(model, head, mixer=kind), gna_utils.keep_layers(model, 1):
        gna_utils.score(model, examples)
    print(type(model._module).__name__, gna_utils.accuracy(scores))
"""


@pytest.mark.slow
def test_everything_works_with_the_kernels_blocked(tmp_path):
    """mamba-ssm cannot be installed without nvcc (state-spaces/mamba issues 602 and 639)."""
    folders = []
    for family in ("llama", "mamba", "mamba2", "zamba2", "qwen3_next"):
        folders.append(str(tmp_path / family))
        tiny.build_hf(family).save_pretrained(folders[-1])
        tiny.tokenizer().save_pretrained(folders[-1])
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *folders],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    classes = [line.split()[0] for line in done.stdout.splitlines()]
    expected = ["Llama", "Mamba", "Mamba2", "Zamba2", "Qwen3Next"]
    assert classes == [f"{name}ForCausalLM" for name in expected]


def test_importing_the_package_loads_no_kernel_and_no_torch():
    code = "import sys, gna_utils; print(sorted({'torch', 'transformers', 'mamba_ssm'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
