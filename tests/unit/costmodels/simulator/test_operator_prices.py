"""Prices of operators: configurations that are priced together, and one by one."""

import pytest
from hypothesis import given, settings

from costmodels.operators.kernels import execution_s
from costmodels.operators.layer_operators import recomputed_share, step_operators
from costmodels.simulator.operator_prices import OperatorPrices
from costmodels.step.communication import issued_collectives
from costmodels.step.launches import launches_of
from tests.support.settings.random_settings import cases, grid_of


@pytest.mark.slow
@given(cases())
@settings(max_examples=40)
def test_prices_are_those_of_each_configuration_alone(case):
    """Whatever is priced with it: operators, their times on each device, what runs again, and what is launched."""
    configs = [case.grid.config(at) for at in range(len(case.grid))]
    prices = OperatorPrices(case.job, case.runtime, configs)

    for config in configs:
        grid = grid_of(config)
        operators = step_operators(case.job, case.runtime, grid)
        again = {op.name: float(recomputed_share(case.job, case.runtime, op, grid)[0]) for op in operators}

        assert [op.name for op in prices.operators(config)] == [op.name for op in operators]
        assert prices.recomputed(config) == pytest.approx({name: share for name, share in again.items() if share})
        kernels, collectives = prices.launches(config)
        for block, launched in zip(case.job.model.block_names, kernels, strict=True):
            own = [op for op in operators if op.block == block]
            assert launched == pytest.approx(sum(launches_of(case.runtime, op) * (1 + again[op.name]) for op in own))
        assert collectives.tolist() == issued_collectives(case.job, case.runtime, grid)[:, 0].tolist()
        for device in case.cluster.devices:
            seconds = {op.name: execution_s(op, device, case.job, case.runtime, grid)[0] for op in operators}
            assert prices.seconds(config, device) == pytest.approx(seconds, rel=1e-12)
