"""Rehearsals of Megatron-LM in FP8: the tensors that Transformer Engine's quantizers make, by hand."""

from __future__ import annotations

import pytest

from tests.support.rehearsal.megatron_study import needs_megatron, write_study
from tests.support.rehearsal.rehearsed import rehearsed

pytestmark = [pytest.mark.slow, needs_megatron()]

HIDDEN, LAYERS, VOCABULARY, FFN, KEYS = 512, 8, 32_000, 1408, 256
MATRICES = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * FFN)
"""Elements of the layers' matrices, by hand."""
PLAIN = 2 * VOCABULARY * HIDDEN + (2 * LAYERS + 1) * HIDDEN
"""Elements of embedding, head and norms, which stay in 16 bits."""
ROOM = 1 << 18
"""Scales and rounding [bytes]."""


def parts(folder, *flags):
    """Parts of the peak of one rank of eight replicas."""
    folder.mkdir(exist_ok=True)
    (answer,) = rehearsed(write_study(folder, *flags), "--config", "dp=8,mbs=1")["ranks"]
    assert answer["verdict"] == "accepted"
    return answer["parts_bytes"]


@pytest.mark.parametrize(("recipe", "form"), [("delayed", "hybrid"), ("tensorwise", "hybrid"), ("blockwise", "e4m3")])
def test_weights_in_fp8_have_a_byte_and_a_transposed_one(tmp_path, recipe, form):
    """On Hopper, whose products in FP8 read rows alone, a matrix has its data and a transposed copy."""
    flags = ("--fp8-format", form, "--fp8-recipe", recipe, "--fp8-param-gather")
    found = parts(tmp_path, *flags)

    assert found["weights"] == pytest.approx(2 * MATRICES + 2 * PLAIN, abs=ROOM)
    assert found["gradients"] == pytest.approx(4 * (MATRICES + PLAIN), abs=ROOM)
    assert found["optimizer"] == pytest.approx(12 * (MATRICES + PLAIN) / 8, abs=ROOM)


def test_fp8_without_weights_in_fp8_keeps_those_of_16_bits(tmp_path):
    """Without `--fp8-param-gather` the weights are those of bf16, and casts of them count as activations."""
    plain, cast = (
        parts(tmp_path / name, *flags) for name, flags in (("plain", ()), ("cast", ("--fp8-format", "hybrid")))
    )

    assert cast["weights"] == plain["weights"] == pytest.approx(2 * (MATRICES + PLAIN), abs=ROOM)
    assert cast["optimizer"] == plain["optimizer"]
    assert cast["activations"] != plain["activations"]


def test_what_a_device_has_not_is_refused_in_the_words_of_transformer_engine(tmp_path):
    """Products in MXFP8 need Blackwell; the cluster has H100."""
    study = write_study(tmp_path, "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8")
    (answer,) = rehearsed(study, "--config", "dp=8,mbs=1", status=1)["ranks"]

    assert answer["verdict"] == "refused"
    assert "compute capability 10.0" in answer["error"]


def test_states_of_the_optimizer_have_the_widths_that_the_program_names(tmp_path):
    """Moments in bf16, and of the fp32 weight what its 16 bits beside it lack: 2 bytes each, over 8 replicas."""
    flags = ("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
    found = parts(tmp_path, *flags)

    assert found["optimizer"] == pytest.approx((2 + 2 + 2) * (MATRICES + PLAIN) / 8, abs=ROOM)
