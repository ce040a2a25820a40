"""Planned steps of torchtitan's models train on real ranks in its own Trainer."""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan: make frameworks")

from tests.support.programs import titan_ranks


@pytest.mark.parametrize(
    ("mesh", "seeds"), [({"data": 2}, (None, 1)), ({"data": 2, "model": 2}, (2,))], ids=["two ranks", "four ranks"]
)
def test_torchtitan_trains_as_planned(on_ranks, tmp_path, mesh, seeds):
    """Losses that the Trainer logs are those of one process without a plan to 1e-5, and norms of gradients to 1e-4, by
    the planner's plan and by random ones from their files; ranks send what the planner's plan counts.
    """
    (plain,) = on_ranks(1, titan_ranks.train, str(tmp_path), None, (None,))[0]
    told = on_ranks(2 ** len(mesh), titan_ranks.train, str(tmp_path), mesh, seeds)

    assert len(plain["losses"]) == 6
    for rank in told:
        for found, seed in zip(rank, seeds, strict=True):
            assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)
            assert found["norms"] == pytest.approx(plain["norms"], rel=1e-4)
            if seed is None:
                assert found["sent"] == [found["expected"]] * 5
