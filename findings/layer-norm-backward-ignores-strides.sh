#!/usr/bin/env bash
# PyTorch 2.13.0, Python 3.11, Linux, CPU: aten.native_layer_norm_backward reads `mean` and `rstd` as if they were contiguous,
# and gives wrong gradients where they are not, without a word.
#
# ATen operators take strided tensors, and this one takes a strided input and a strided gradient. Autograd hands it the
# contiguous statistics of the forward pass, so nobody sees the difference. Whoever runs a traced step on parts of its tensors
# does: a column of a wider tensor has the same values and the same shape, and the gradient of the input is another one.
# Sliced statistics need `.contiguous()`.
#
# Seen:
#   strided gradient and input: equal True
#   strided statistics: the same values True, equal gradients False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat > "$folder/norm.py" <<'PROGRAM'
import torch

torch.manual_seed(0)
rows, width = 8, 16
given, grad = torch.randn(rows, width), torch.randn(rows, width)
weight, bias = torch.ones(width), torch.zeros(width)
_, mean, rstd = torch.ops.aten.native_layer_norm(given, [width], weight, bias, 1e-5)


def gradient(grad, given, mean, rstd):
    every = [True, True, True]
    return torch.ops.aten.native_layer_norm_backward(grad, given, [width], mean, rstd, weight, bias, every)[0]


def strided(tensor):
    """Return the same values as every second column of a wider tensor."""
    wide = torch.ones(tensor.shape[0], 2 * tensor.shape[1])
    wide[:, ::2] = tensor
    return wide[:, ::2]


expected = gradient(grad, given, mean, rstd)
by_input = gradient(strided(grad), strided(given), mean, rstd)
by_statistics = gradient(grad, given, strided(mean), strided(rstd))
alike = torch.equal(strided(mean), mean) and torch.equal(strided(rstd), rstd)
print(f"strided gradient and input: equal {torch.allclose(by_input, expected)}")
print(f"strided statistics: the same values {alike}, equal gradients {torch.allclose(by_statistics, expected)}")
PROGRAM
seen=$("$folder/venv/bin/python" "$folder/norm.py" 2>/dev/null)
echo "$seen"
diff - <(echo "$seen") <<'EXPECTED'
strided gradient and input: equal True
strided statistics: the same values True, equal gradients False
EXPECTED
