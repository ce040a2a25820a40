"""Lines of published logs that say memory is used up, and such as only speak of it."""

import pytest

from costmodels.job.parallel_config import ParallelConfig
from tests.support.programs.small_commands import backend_of
from trials.backend import Status
from trials.command.memory_messages import lack_of_memory, says_memory_is_used_up

USED_UP = {
    "cuda": "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    # github.com/rshaojimmy/MADDoG/issues/11
    "cuda-2021": "RuntimeError: CUDA out of memory. Tried to allocate 2.87 GiB (GPU 0; 14.76 GiB total capacity)",
    # github.com/huggingface/autotrain-advanced/issues/737
    "hip": "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 124.00 MiB.",
    # github.com/keras-team/keras/issues/13889
    "hip-driver": "rocm_driver.cc:606] failed to allocate 127.99TiB from device: HIP_ERROR_OutOfMemory",
    # github.com/xingchensong/TouchNet/issues/100
    "npu": "RuntimeError: NPU out of memory. Tried to allocate 5.03 GiB (NPU 3; 60.96 GiB total capacity; 49.47 GiB",
    # github.com/JingyunLiang/VRT/issues/49
    "cpu": "RuntimeError: [enforce fail at alloc_cpu.cpp:73] . DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 116813856768 bytes. Error code 12 (Cannot allocate memory)",
    # github.com/IvanoLauriola/MKLpy/issues/27
    "cpu-windows": "DefaultCPUAllocator: not enough memory: you tried to allocate 5077901088 bytes.",
    "python": "[rank0]: MemoryError",
    "numpy": "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 3.20 GiB",
    "c++": "terminate called after throwing an instance of 'std::bad_alloc'",
    # www.osc.edu/documentation/knowledge_base/out_of_memory_oom_or_excessive_memory_usage
    "slurm": "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=14604003.0 cgroup. Some of your processes may "
    "have been killed by the cgroup out-of-memory handler.",
    "srun": "srun: error: o0616: task 0: Out Of Memory",
    "linux": "[11686.043641] Out of memory: Killed process 2603 (python) total-vm:1454496kB, anon-rss:1024360kB",
    "xla": "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory",
}

MENTIONED = {
    # github.com/ildoonet/tf-pose-estimation/issues/225
    "survived": "W tensorflow/core/common_runtime/bfc_allocator.cc:219] Allocator (GPU_0_bfc) ran out of memory trying "
    "to allocate 2.19GiB. The caller indicates that this is not a failure",
    # github.com/xinntao/Real-ESRGAN/issues/272
    "advised": "If you encounter CUDA out of memory, try to set --tile with a smaller number.",
    "source": "    except MemoryError:",
    "flag": "  exit_on_out_of_memory_error ..................... True",
}


@pytest.mark.parametrize("which", USED_UP)
def test_a_message_is_known(which):
    """What allocators of GPUs, NPUs and hosts print, and what is left where Linux has killed, is told from the rest."""
    assert says_memory_is_used_up(USED_UP[which])
    assert lack_of_memory(f"begin\n{USED_UP[which]}\nthe end", "") == USED_UP[which]


@pytest.mark.parametrize("which", MENTIONED)
def test_a_mention_is_none(which):
    """A log that speaks of memory before another error fails for that error."""
    error = "ValueError: hidden size must be divisible by 3"

    assert lack_of_memory(f"{MENTIONED[which]}\n{error}", error) == ""


def test_a_last_error_may_use_its_own_words():
    """A program's own words count where they are its last error."""
    error = "MyTrainer.Error: ran out of memory on device 3"

    assert lack_of_memory(f"loading\n{error}", error) == error


def test_a_trial_that_mentions_memory_crashes():
    """The whole way: a program that warns of memory and fails for another reason has crashed."""
    script = f"import sys; print({MENTIONED['advised']!r}); sys.exit('RuntimeError: shapes do not match: 3 and 4')"
    found = backend_of(arguments=("python3", "-c", script)).measure(ParallelConfig(dp=2, mbs=1), trial_number=0)

    assert found.status is Status.CRASHED
    assert "shapes do not match" in found.reason
