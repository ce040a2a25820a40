"""Functions that ranks run in the tests of planned steps; a separate module, because ranks import it by name."""

NUM_STEPS = 3


def train_planned(place, plan, top_k=1):
    """Train some steps under a plan; report their losses, and the recording of the last one."""
    from trials.torch_training.planned.step import PlannedStep
    from trials.torch_training.process_group import process_group
    from trials.torch_training.profiling.recording import BACKEND, register_recorded_backend

    recorder = register_recorded_backend()
    with process_group(place, "cpu", backend=BACKEND):
        step = PlannedStep(plan, top_k=top_k)
        losses = [step.step() for _ in range(NUM_STEPS - 1)]
        recorder.start()
        losses.append(step.step())
        place.tell((losses, recorder.stop()))
