"""Study of two simulated trials, which runs in a second."""

SHORT_STUDY = """
name: small
model: llama-7b
cluster: {name: dgx-a100, hosts: 1}
job: {sequence_length: 4096, global_batch_size: 64}
space: {pp: [1, 2], cp: [1], up: [1], vpp: [1], mbs: [1]}
search: {draws: 10, confidence: 1.0, max_trials: 2}
trial: {backend: simulated}
"""
