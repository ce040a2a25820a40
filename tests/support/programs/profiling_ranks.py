"""Functions that ranks run in the tests of profiles; a separate module, because ranks import it by name."""


def profile(place, job, runtime, config):
    """Report the profile of the second and third step."""
    from trials.torch_training.process_group import process_group
    from trials.torch_training.profiling.step_profiler import profile_steps
    from trials.torch_training.training import Trainer

    with process_group(place, "cpu") as device:
        trainer = Trainer(job, runtime, config, device)
        trainer.start_step()
        place.tell(profile_steps(trainer.start_step, device, num_steps=2))
