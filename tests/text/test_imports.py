"""Text and weights are torch-free: API processes must start fast and stay small."""

from __future__ import annotations

import subprocess
import sys


def test_no_torch_is_imported() -> None:
    modules = "text.template text.tokenizer text.detokenizer weights.load weights.fetch quantization.ggml".split()
    code = "import sys; " + "; ".join(f"import octavo.{module}" for module in modules)
    code += "; sys.exit(bool({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
