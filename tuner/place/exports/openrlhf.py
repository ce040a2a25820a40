"""Placement as flags of OpenRLHF.

Source: openrlhf/cli/train_ppo_ray.py, which also asserts that a colocated reference has as many devices as the actor, a
colocated reward model as many as the critic, and colocated engines as many as the actor.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from tuner.place.exports.roles import Export, Role
from tuner.place.search.problem import PlacementProblem
from tuner.place.workload import Workload


def launchable_by_openrlhf(workload: Workload) -> Workload:
    """Return the workload with the rules of Ray's placement groups: modules share all of their devices, or none."""
    return replace(workload, pools=True)


def export_to_openrlhf(problem: PlacementProblem, roles: dict[str, Role]) -> Export:
    """Return the flags of OpenRLHF's trainer."""
    actor, rollout = roles["actor"], roles["rollout"]
    made = rollout.generation
    assert made is not None, "a rollout generates"
    notes = ["OpenRLHF trains with DeepSpeed: name such a profile as `runtime` for its times (megatron-deepspeed)"]
    names = {
        "actor": actor,
        "ref": roles.get("reference"),
        "critic": roles.get("critic"),
        "reward": roles.get("reward"),
    }
    lines: list[str] = []
    for name, role in names.items():
        if role is None:
            continue
        if role.nodes is None:
            notes.append(f"{role.name} has unequal numbers of devices on its hosts")
        else:
            lines += [f"--{name}_num_nodes {role.nodes[0]}", f"--{name}_num_gpus_per_node {role.nodes[1]}"]
        if role.config.pp > 1 or role.config.ep > 1:
            notes.append(f"{role.name} has pp={role.config.pp} and ep={role.config.ep}, which OpenRLHF does not have")
    lines += [
        f"--vllm_num_engines {rollout.config.dp}",
        f"--vllm_tensor_parallel_size {rollout.config.tp}",
        f"--vllm_gpu_memory_utilization {rollout.memory_share:.2f}",
        f"--ds_tensor_parallel_size {actor.config.tp}",
        f"--ring_attn_size {actor.config.cp}",
        f"--zero_stage {actor.config.zero_stage}",
        f"--micro_train_batch_size {actor.config.mbs}",
        f"--train_batch_size {actor.mini_batch}",
        f"--rollout_batch_size {made.prompts}",
        f"--n_samples_per_prompt {made.responses_per_prompt}",
        f"--prompt_max_len {made.prompt_tokens}",
        f"--generate_max_len {made.longest_response_tokens}",
    ]
    if rollout.config.pp > 1:
        notes.append(f"engines have {rollout.config.pp} pipeline stages, which OpenRLHF's engines do not have")
    lines += _colocation(problem, roles, notes)
    if problem.workload.overlap_steps:
        lines += ["--async_train", "--async_queue_size 1"]
    if actor.config.recompute == "full":
        lines.append("--gradient_checkpointing")
    return Export(lines=tuple(lines), notes=tuple(notes))


def _colocation(problem: PlacementProblem, roles: dict[str, Role], notes: list[str]) -> list[str]:
    """Return the flags that say which models share devices."""
    actor = roles["actor"]
    if all(role.cells == actor.cells for role in roles.values()) and not problem.workload.overlap_steps:
        asleep = ["--deepspeed_enable_sleep"] if actor.option.leaves else []
        return ["--colocate_all_models", "--vllm_enable_sleep", *asleep]
    lines = []
    pairs = {("actor", "reference"): "--colocate_actor_ref", ("critic", "reward"): "--colocate_critic_reward"}
    for pair, flag in pairs.items():
        if set(pair) <= set(roles) and roles[pair[0]].cells == roles[pair[1]].cells:
            lines.append(flag)
    for one, other in itertools.combinations(roles, 2):
        if (one, other) not in pairs and (other, one) not in pairs and roles[one].cells == roles[other].cells:
            told = f"{roles[one].name} and {roles[other].name}"
            notes.append(f"{told} share devices, which OpenRLHF has only where all models do (--colocate_all_models)")
    return lines
