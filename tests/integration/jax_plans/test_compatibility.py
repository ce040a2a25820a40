"""The attention example of TOAST's section 3 on training steps of a transformer, as JAX writes them."""

import itertools

import pytest

pytest.importorskip("jax", reason="the training steps are traced by JAX")

import jax.numpy as jnp

from benchmarks.zoo import SMALL_GEMMA, Gemma, moe_small, unet_small
from costmodels.sharding.frontends.jax.graph import graph_of_jax
from tuner.planners.toast.compatibility import compatibility, turn_of
from tuner.planners.toast.named_dims import named_dims

SIZES = {name: getattr(SMALL_GEMMA, name) for name in Gemma.__slots__}


class OwnMasks(Gemma):
    """A transformer in which each layer sees another part of the past."""

    __slots__ = ("seen",)

    def attend(self, layer, x_btd, positions, mask):
        """Attention to the last few tokens."""
        if not hasattr(self, "seen"):
            object.__setattr__(self, "seen", itertools.count(1))
        behind = positions[:, None] - positions[None, :]
        return super().attend(layer, x_btd, positions, mask & (behind < next(self.seen)))


def of(program):
    """Return the compatibility sets of a program."""
    fn, arguments, donated = program
    return compatibility(named_dims(graph_of_jax(fn, *arguments, donated=donated)))


def by_direction(found):
    """Count the sets of the forward and of the backward pass."""
    turn = turn_of(found.names.graph)
    passes = [{bool(found.names.ops[one] >= turn) for one, _ in each.sides} for each in found.sets]
    assert all(len(each) == 1 for each in passes)
    return passes.count({False}), passes.count({True})


@pytest.mark.parametrize("model", [Gemma, OwnMasks])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_a_transformer_has_four_resolutions(layers, model):
    """Each layer has one set per direction, and all of a direction share one choice, with one mask or with many."""
    found = of(model(**{**SIZES, "layers": layers}).train_program())

    assert by_direction(found) == (layers, layers)
    assert found.num_resolutions == 4
    assert len({each.colour for each in found.sets}) == 1


def test_experts_add_no_conflict():
    """A transformer of experts has the conflicts of attention alone."""
    assert of(moe_small()).num_resolutions == 4


def test_a_mask_that_is_data_ties_all_layers():
    """A mask that is an input is no constant: it must be cut one way, and so all layers have one set forward."""

    class GivenMask(Gemma):
        __slots__ = ()

        def loss(self, params, batch):
            x_btd = params["embedding"][batch["tokens"]]
            for layer in params["layers"].values():
                x_btd = x_btd + self.attend(layer, x_btd, jnp.arange(self.tokens), batch["mask"])
            return jnp.mean(x_btd)

    model = GivenMask(**{**SIZES, "layers": 2})
    fn, (params, optimizer, batch), donated = model.train_program()
    mask = batch["tokens"].update(shape=(model.tokens, model.tokens), dtype=jnp.bool_)
    found = of((fn, (params, optimizer, batch | {"mask": mask}), donated))

    assert by_direction(found)[0] == 1


def test_a_convolutional_network_with_attention():
    """U-Net has the two sets of its one attention layer."""
    assert by_direction(of(unet_small())) == (1, 1)
