#!/usr/bin/env bash
# PyTorch 2.13.0, Python 3.11, Linux, CPU: the backward pass of dropout keeps a mask as wide as the activations.
#
# On a device `torch.nn.functional.dropout` is one fused operator, `native_dropout`, whose mask is bool: one byte an
# element, the figure in every published count of activations (Korthikanti et al. 2022, section 4.1). On the CPU the same
# call is a multiplication by a mask of the input's type: two bytes in bf16 and four in fp32. Whoever measures the memory of
# a training step on the CPU, or under fake tensors on it, counts masks of dropout two or four times too large, and nothing
# says so: values, shapes and operators of the model's code are the same. `torch.native_dropout` can be called on the CPU
# too and keeps what a device keeps.
#
# Seen, for an input of 1,048,576 elements:
#   dropout bfloat16: kept 2097152 bytes of torch.bfloat16
#   dropout float32: kept 4194304 bytes of torch.float32
#   native_dropout bfloat16: kept 1048576 bytes of torch.bool
#   native_dropout float32: kept 1048576 bytes of torch.bool
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat > "$folder/kept.py" <<'PROGRAM'
import torch


def kept(name, function, dtype):
    found = []
    x = torch.ones(1024, 1024, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: found.append(tensor) or tensor, lambda tensor: tensor):
        function(x)
    for tensor in found:
        size = tensor.numel() * tensor.element_size()
        print(f"{name} {str(dtype).removeprefix('torch.')}: kept {size} bytes of {tensor.dtype}")


for dtype in (torch.bfloat16, torch.float32):
    kept("dropout", lambda x: torch.nn.functional.dropout(x, 0.1), dtype)
for dtype in (torch.bfloat16, torch.float32):
    kept("native_dropout", lambda x: torch.native_dropout(x, 0.1, True), dtype)
PROGRAM
seen=$("$folder/venv/bin/python" "$folder/kept.py" 2>/dev/null)
echo "$seen"
diff - <(echo "$seen") <<'EXPECTED'
dropout bfloat16: kept 2097152 bytes of torch.bfloat16
dropout float32: kept 4194304 bytes of torch.float32
native_dropout bfloat16: kept 1048576 bytes of torch.bool
native_dropout float32: kept 1048576 bytes of torch.bool
EXPECTED
