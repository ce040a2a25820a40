"""Training job: the model, the job itself, the runtime and the parallelism configuration.

Begin with `training_job.py` for the job and `parallel_config.py` for configurations, one or many as arrays.
`runtime.py` holds the facts and fitted constants of a training framework.
"""
