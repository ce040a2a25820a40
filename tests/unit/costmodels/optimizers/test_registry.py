"""The table of optimizers."""

from __future__ import annotations

from typing import get_args

import pytest

from costmodels.optimizers.registry import DEFAULT_OPTIMIZER, OPTIMIZERS, OptimizerName, optimizers_of

FRAMEWORKS = ("megatron", "deepspeed", "gpt-neox", "nanotron", "torchtitan")


def test_study_files_may_name_every_optimizer():
    """The type of the key and the table have the same names, and the default is one of them."""
    assert set(get_args(OptimizerName)) == OPTIMIZERS.keys()
    assert DEFAULT_OPTIMIZER in OPTIMIZERS


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_name_of_a_framework_means_two_optimizers(framework):
    """What an exporter writes is read back as the same optimizer."""
    spellings = [text for one in OPTIMIZERS.values() for text in one.spellings.get(framework, ())]

    assert len(set(spellings)) == len(spellings)
    for name, one in OPTIMIZERS.items():
        if framework in one.spellings:
            assert optimizers_of(framework)[one.spellings[framework][0]] == name
