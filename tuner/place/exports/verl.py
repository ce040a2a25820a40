"""Placement as arguments of verl.

Sources: keys of verl/trainer/config/_generated_ppo_megatron_trainer.yaml; pools of verl/trainer/main_ppo.py
(`init_resource_pool_mgr`: one global pool of trainer.nnodes hosts for actor, rollout, critic and reference, and a pool
of its own for the reward model where it is enabled); generation on devices of its own, beside the training of the step
before, of recipe/one_step_off_policy/README.md (hybrid_engine=False, rollout.nnodes). verl counts ppo_mini_batch_size
in prompts.
"""

from __future__ import annotations

from dataclasses import replace

from tuner.place.exports.roles import Export, Role, roles_of
from tuner.place.search.problem import PlacementProblem
from tuner.place.workload import Workload


def launchable_by_verl(workload: Workload) -> Workload:
    """Return the workload with the rules of verl's pools."""
    roles = roles_of(workload)
    pool = tuple(roles[role] for role in ("actor", "rollout", "reference", "critic") if role in roles)
    if not workload.overlap_steps:
        return replace(workload, pools=True, together=(*workload.together, pool))
    rollout = roles.get("rollout", -1)
    trainers = tuple(unit for unit in pool if unit != rollout)
    return replace(
        workload,
        pools=True,
        together=(*workload.together, trainers),
        # the recipe's pool for generation holds nothing else
        apart=(*workload.apart, *((rollout, unit) for unit in (trainers[0], roles.get("reward", trainers[0])))),
    )


def export_to_verl(_: PlacementProblem, roles: dict[str, Role]) -> Export:
    """Return the arguments of verl's trainer."""
    actor, rollout = roles["actor"], roles["rollout"]
    made = rollout.generation
    assert made is not None, "a rollout generates"
    notes: list[str] = []
    per_prompt = made.responses_per_prompt
    if actor.mini_batch % per_prompt:
        notes.append(f"ppo_mini_batch_size counts prompts: {actor.mini_batch} sequences are no whole number of them")
    lines = [
        f"data.train_batch_size={made.prompts}",
        f"data.max_prompt_length={made.prompt_tokens}",
        f"data.max_response_length={made.longest_response_tokens}",
        *_pool("trainer", actor, notes),
        *_megatron("actor_rollout_ref.actor", actor),
        f"actor_rollout_ref.actor.ppo_mini_batch_size={max(actor.mini_batch // per_prompt, 1)}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={actor.config.mbs}",
        f"actor_rollout_ref.rollout.n={per_prompt}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={actor.config.mbs}",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={rollout.config.tp}",
        f"actor_rollout_ref.rollout.pipeline_model_parallel_size={rollout.config.pp}",
        f"actor_rollout_ref.rollout.max_num_seqs={rollout.option.layout.concurrency}",
        f"actor_rollout_ref.rollout.gpu_memory_utilization={rollout.memory_share:.2f}",
    ]
    if rollout.cells == actor.cells:
        lines += ["actor_rollout_ref.hybrid_engine=True", "actor_rollout_ref.rollout.free_cache_engine=True"]
    else:
        lines += ["actor_rollout_ref.hybrid_engine=False", *_pool("rollout", rollout, notes)]
        lines.append("actor_rollout_ref.rollout.free_cache_engine=False")
        notes.append("run it by verl's recipe one_step_off_policy, whose configuration has the keys of rollout")
    if "reference" in roles:
        reference = roles["reference"]
        lines += _megatron("actor_rollout_ref.ref", reference)
        lines.append(f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={reference.config.mbs}")
    if "critic" in roles:
        critic = roles["critic"]
        lines += ["critic.enable=True", *_megatron("critic", critic)]
        lines.append(f"critic.ppo_micro_batch_size_per_gpu={critic.config.mbs}")
    if "reward" in roles:
        reward = roles["reward"]
        lines += ["reward_model.enable=True", *_degrees("reward_model.megatron", reward)]
        lines.append(f"reward_model.micro_batch_size_per_gpu={reward.config.mbs}")
        lines.append(f"reward_model.megatron.param_offload={reward.option.leaves}")
        if reward.cells != actor.cells:
            lines += ["reward_model.enable_resource_pool=True", *_pool("reward_model", reward, notes)]
    return Export(lines=tuple(lines), notes=tuple(notes))


def _pool(prefix: str, role: Role, notes: list[str]) -> list[str]:
    if role.nodes is None:
        notes.append(f"{prefix}: {role.name} has unequal numbers of devices on its hosts, which no pool has")
        return []
    return [f"{prefix}.nnodes={role.nodes[0]}", f"{prefix}.n_gpus_per_node={role.nodes[1]}"]


def _degrees(prefix: str, role: Role) -> list[str]:
    config = role.config
    lines = [
        f"{prefix}.tensor_model_parallel_size={config.tp}",
        f"{prefix}.pipeline_model_parallel_size={config.pp}",
        f"{prefix}.context_parallel_size={config.cp}",
        f"{prefix}.expert_model_parallel_size={config.ep}",
    ]
    if config.vpp > 1:
        lines.append(f"{prefix}.virtual_pipeline_model_parallel_size={config.vpp}")
    return lines


def _megatron(prefix: str, role: Role) -> list[str]:
    megatron = f"{prefix}.megatron"
    lines = [f"{prefix}.strategy=megatron", *_degrees(megatron, role)]
    lines += [
        f"{megatron}.{part}_offload={role.option.leaves}"
        for part in (("param", "grad", "optimizer") if not prefix.endswith("ref") else ("param",))
    ]
    recompute = role.config.recompute
    if recompute != "none":
        lines.append(f"+{megatron}.override_transformer_config.recompute_granularity={recompute}")
    if recompute == "full":
        lines.append(f"+{megatron}.override_transformer_config.recompute_method=uniform")
        lines.append(f"+{megatron}.override_transformer_config.recompute_num_layers=1")
    return lines
