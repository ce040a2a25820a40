"""Program that prints the lines of a training program, with the timing and the end that its arguments select.

It runs as a separate command. With `listen-at` it first listens there, as a launcher does. `mode` selects its end:

    well       after its steps
    forever    never: it continues to train
    silent     never: it stops printing
    memory     like torch when a GPU is full
    fault      with a traceback
    status     with exit status 255, as ssh and srun do
    killed     by SIGKILL, as by the kernel when a machine lacks memory
    child      well, but leaves a child in a separate session that sleeps for an hour
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time


def main() -> None:
    """Print one line per step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--train-iters", type=int, default=7)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--mode", default="well")
    parser.add_argument("--at", type=int, default=3)
    parser.add_argument("--pids")
    parser.add_argument("--listen-at")
    arguments, _ = parser.parse_known_args()
    if arguments.pids:
        with open(arguments.pids, "a", encoding="ascii") as file:  # noqa: PTH123 # a program of nobody's style
            file.write(f"{os.getpid()}\n")
    if arguments.listen_at:
        host, _, port = arguments.listen_at.rpartition(":")
        socket.create_server((host, int(port)))
    step_ms = arguments.step_ms / arguments.tensor_model_parallel_size + 2 * arguments.micro_batch_size
    say("> building GPT model ...")
    iteration = 0
    while iteration < arguments.train_iters or arguments.mode == "forever":
        iteration += 1
        if iteration == arguments.at:
            end(arguments.mode, arguments.pids)
        time.sleep(step_ms / 1000)
        shown_ms = step_ms * (5 if iteration == 1 else 1)
        say(
            f" [2026-11-22 10:00:00] iteration {iteration:8d}/{arguments.train_iters:8d} | consumed samples: "
            f"{iteration * 8:12d} | elapsed time per iteration (ms): {shown_ms:.1f} | learning rate: 1.0E-04 |"
        )
        if iteration == 1:
            say(
                "[Rank 0] (after 1 iterations) memory (MB) | allocated: 900.5 | max allocated: 1500.0 | "
                "reserved: 1800.0 | max reserved: 2048.0"
            )


def say(line: str) -> None:
    """Print a line and flush it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def end(mode: str, pids: str | None) -> None:
    """End as `mode` says, if it selects an end."""
    if mode == "silent":
        time.sleep(3600)
    if mode == "memory":
        say("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
        sys.exit(1)
    if mode == "status":
        sys.exit(255)
    if mode == "fault":
        raise ValueError("hidden size must be divisible by 3")
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "child":
        child = subprocess.Popen(["sleep", "3600"], start_new_session=True)  # noqa: S607 # as a launcher would
        if pids:
            with open(pids, "a", encoding="ascii") as file:  # noqa: PTH123 # as above
                file.write(f"{child.pid}\n")


if __name__ == "__main__":
    main()
