"""torchtitan's own parser reads the commands of trials whose flags were exchanged in place."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from tests.unit.tuner.study_file.test_torchtitan_words import LAUNCH, OF_0_3
from tuner.imports import IMPORTERS
from tuner.space.enumeration import build_space
from tuner.study_file.answers import Added
from tuner.study_file.config import load_study
from tuner.study_file.new_study import new_study

PIPED = OF_0_3.replace(
    "pipeline_parallel_degree 1",
    "pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule Interleaved1F1B "
    "--training.disable_cuda_graphs --training.global_batch_size 16",
)


@pytest.mark.slow
@pytest.mark.parametrize("words", [OF_0_3, PIPED], ids=["plain", "with a pipeline"])
def test_each_candidate_is_what_the_parser_reads(tmp_path, words):
    """Degrees, batches and what FSDP keeps are the candidate's, and every other value is the script's."""
    try:
        from torchtitan.config.manager import ConfigManager
        from torchtitan.distributed.pipeline_parallel import _get_pipeline_metadata
    except ImportError as error:
        pytest.skip(f"{error}; `make frameworks` installs it")
    script, out = tmp_path / "train.sh", tmp_path / "study.yaml"
    added = Added(cluster="dgx-h100", answers={"hosts": 1})
    out.write_text(new_study(IMPORTERS["torchtitan"](f"{LAUNCH} {words}"), added, file=script, out=out).text)
    found = load_study(out)
    problem = found.problem
    space = build_space(problem.setting, problem.options, current=problem.current)

    def read(config):
        arguments = found.trials.backend.plan(config, 0).arguments
        return ConfigManager().parse_args(list(arguments[arguments.index("torchtitan.train") + 1 :]))

    today, batch = read(problem.current), problem.setting.job.global_batch_size
    configs = [space.grid.config(row) for row in range(0, len(space.grid), max(1, len(space.grid) // 16))]
    assert len(configs) > 10
    for config in configs:
        said = read(config)
        layout = said.parallelism
        shards = layout.data_parallel_shard_degree
        if shards == -1:
            shards = problem.setting.cluster.num_devices // (config.pp * config.tp * config.cp)
        dp = layout.data_parallel_replicate_degree * shards
        assert (layout.pipeline_parallel_degree, layout.tensor_parallel_degree) == (config.pp, config.tp)
        assert (layout.context_parallel_degree, layout.expert_parallel_degree, dp) == (config.cp, config.ep, config.dp)
        local = said.training.local_batch_size
        assert said.training.global_batch_size in ([batch, -1] if local * dp == batch else [batch])
        if config.pp > 1:
            assert layout.pipeline_parallel_microbatch_size == config.mbs
            assert ("Interleaved" in layout.pipeline_parallel_schedule) == (config.vpp > 1)
            assert said.training.disable_cuda_graphs
            model = SimpleNamespace(layers=[None] * problem.setting.job.model.num_layers)
            named = layout.module_fqns_per_model_part
            stages = len(named) if named else _get_pipeline_metadata(SimpleNamespace(pp=config.pp), layout, model)[0]
            assert stages == config.pp * config.vpp
            assert local % config.mbs == 0
        else:
            assert local == config.mbs
        keeps = layout.fsdp_reshard_after_forward
        keeps = keeps if keeps != "default" else "never" if config.pp > 1 else "always"
        assert keeps == ("always" if config.zero_stage == 3 else "never")
        for section in ("compile", "metrics", "checkpoint", "optimizer"):
            assert asdict(getattr(said, section)) == asdict(getattr(today, section))
