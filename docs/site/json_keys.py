"""Keys of every command's `--json` output, with their meanings; a test compares the keys with the actual output."""

from __future__ import annotations

from collections.abc import Mapping

_GAINS = {
    "gain_over_current": "number of times that the best is as fast as the current configuration: the median of the "
    "posterior of both step times, given all trials; null without one, and where it does not run",
    "gain_over_current_interval": "two ends between which that gain is with a probability of 90%; null if not known",
    "gain_over_baseline": "the same over the baseline",
    "gain_over_baseline_interval": "two ends between which that gain is with a probability of 90%; null if not known",
    "measured_gain": "ratio of both measured step times, which is too large where the fastest trial was a lucky one; "
    "null without both",
    "reference": "configuration that the best is compared with: `role` (`current` or `baseline`), what is `known` of "
    "it (`measured`, `cut_off`, `predicted`, `failed`, `predicted_not_to_fit`), the `reason` why nothing is compared "
    "with it, and its measured `step_time_s`; null without one",
}
_COUNTS = {
    "trials": "number of trials that have ended, of any kind",
    "proxies": "number of these that ran a smaller proxy job",
    "failed": "number of trials that failed",
    "pruned": "number of trials that were stopped early",
    "saved_s": "estimated time of steps saved by stopping early [s]",
    "device_hours": "device-hours of all trials; for simulated trials, those that their steps would have taken",
    "startup_device_hours": "part of these before the first measured step and in lost attempts; null without devices",
    "payback_steps": "training steps after which the gain repays the trials; null without a gain or wall clock",
}
_CLOCK = "clock of the step times: `wall`, `virtual` or `cpu`"
_PROXY = (
    "smaller job that runs in its place: `hosts`, `devices`, `layers`, `global_batch_size` and `config`; null at full "
    "size"
)
_TRAINING = (
    "what the study's `limits.tokens` take with the best: `seconds`, `device_hours`, `cost`, and the limits that this "
    "`breaks`; null without such limits"
)
_IN_TRAINING = (
    "training in which the trials run (`trial.training`): the `step` and `checkpoint` it has come to, the `trials` "
    "whose steps count, with `first_step` and `last_step`, and all that `in_words`; null without one"
)
_IDLE_HOSTS = (
    "numbers of the `hosts` that it leaves idle, their `device_share`, and the `gain` over the best layout that uses "
    "all hosts; null if it uses all"
)
_SOURCE = (
    "origin of the step time: `measured`, `synthetic` (simulated), `learned` (from trials of other configurations) or "
    "`predicted`"
)
_REGULAR = " (once trials have taught, if the configuration behaves like those measured)"
_SLOWER = (
    "probability that the step is slower than `step_time_range_s` says, since something may slow it down that no trial "
    "has shown"
)
_BASIS = {
    "taught_by_trials": "number of candidates whose trials the answer rests on; 0 for the cost model's predictions",
    "looked_in": "storage in which trials were looked for",
}
_PREDICTION = {
    "step_time_s": "time of one optimizer step [s]",
    "breakdown_s": "parts of the step time: compute, exposed communication by dimension, host and others [s]",
    "peak_memory_bytes": "peak memory of the fullest device",
    "memory_bytes": "parts of the peak memory",
    "memory_capacity_bytes": "memory of that device",
    "fits": "whether the memory headroom stays free",
    "mfu": (
        "model FLOPs utilisation: FLOPs of the model, including the masked half of attention, over the peak of all "
        "devices; may exceed 1 on very long sequences"
    ),
    "tokens_per_s_per_device": "training throughput per device [tokens/s]",
}

JSON_KEYS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "run": {
        "": {
            "best": "best configuration: degrees and opened dimensions; null if none works",
            "step_time_s": "step time of the best configuration [s]",
            "tokens_per_s_per_device": "training throughput per device [tokens/s]",
            **_GAINS,
            "source": _SOURCE,
            "clock": _CLOCK,
            "training": _TRAINING,
            "extrapolated": "whether the best is inferred from proxy jobs only",
            "in_training": _IN_TRAINING,
            "front": "trials that no other beats in both values of the study: `trial`, `config` and the values; empty "
            "for a study of one value",
            **_COUNTS,
            "candidates": "number of configurations in the search space",
            "p_star": "confidence that no untried configuration is faster, from 0 to 1",
            "stop_reason": "reason why the search ended",
            "study_name": "name of the study",
            "storage": "database of the study, without the password",
            "hosts": "hosts on which the best runs; those that were lost at the end are missing",
        }
    },
    "trial": {
        "with `--dry-run`": {
            "config": "configuration of the trial",
            "proxy": _PROXY,
            "starts": "sentence on what starts where, and how often",
            "command": "words of the user's command on one host; null if a trial starts none",
            "environment": "variables that are set for it; null for one that is removed",
            "directory": "directory of the command; null without one",
            "files": "texts of the files that the trial gets copies of, by the placeholders of their paths",
            "submit": "words of the command that submits the batch file; null without a queue",
            "batch_file": "batch file of the trial; null without a queue",
        },
        "with `--once`": {
            "config": "configuration of the trial",
            "proxy": _PROXY,
            "status": "outcome: `ok`, `out_of_memory`, `crashed`, `timeout`, `incident`",
            "reason": "sentence on the cause of the outcome; empty if there is nothing to say",
            "step_time_s": "median time of the measured steps [s]; null unless the trial ended well",
            "step_times_s": "time of each measured step [s]",
            "predicted_s": "step time that the cost model predicts for what ran [s]",
            "log_step_time_s": "step time of the log that `measured` in the study states [s]; null without one, and "
            "for other configurations than the current one",
            "ratio_to_log": "the measured step time over the log's; null without both",
            "peak_memory_bytes": "peak memory of the fullest device; null if the log states none",
            "source": "origin of the step time: `measured` or `synthetic`",
            "clock": _CLOCK,
            "kept_as": "number of the trial in the study; null if it is not kept",
            "not_kept": "reason why it is not kept; null if it is",
        },
    },
    "rehearse": {
        "": {
            "config": "configuration that was rehearsed",
            "world": "number of ranks of the world",
            "ranks": "answer of each rank: `framework` (`torch`, `jax`), `compiled_for` (`gpu` or `cpu`; null with "
            "PyTorch), `verdict` (`accepted`, `refused`, `unknown`), `error` and `where`, `printed` (last lines), "
            "`parameters`, `peak_bytes` of tensors and its `parts_bytes`, `workspace_bytes` of cuBLAS beside them, "
            "`micro_batches` (made, and of a step), `is_whole_step` (bytes, operators and collectives are those of all "
            "micro-batches), `operators`, `collectives`, `invented` answers",
            "predicted_bytes": "bytes of tensors at each stage's peak by the cost model; null without one",
        },
        "with `--leaders` instead": {
            "leaders": "for each candidate its `rank` and `config`, `verdict` (the worst of its stages), `error` and "
            "`where`, `peaks_bytes` of tensors of each stage; of its fullest `stage` the rehearsed `peak_bytes`, "
            "`predicted_bytes`, `needed_bytes` with what the device adds, and `capacity_bytes`; `cpu_s` of a step"
        },
        "with `--time`, also": {
            "step_s": "time of a step by replay of what the ranks ran, with the runtime's overheads [s]; null if a "
            "stage has no accepted rank",
            "ranks_s": "time until each of `ranks` has done its last work, without overheads [s]",
            "predicted_step_s": "time of a step by the closed form, as `predict` tells it [s]",
        },
        "with `--export`, also": {"exported": "`target` and `arguments` of the export that was rehearsed"},
    },
    "init": {
        "": {
            "written": "study file that was written",
            "model": "model file that was written beside it; null for a model of the catalog",
            "current": "current configuration; null if the file describes a model only",
            "job": "keys of the job found in the file",
            "devices": "number of devices of the cluster",
            "trial": "`command` if trials run your own command, else `simulated`",
            "measured": "what a log's steps say of the current configuration: `step_time_s`, `readings` (log lines), "
            "`peak_memory_bytes`, `source`; null without",
            "steps": "lines of a log that may be of steps: how many were `found` and are `used`, what the others are "
            "(`unread`, `memory`, `repeated`, `other_batch`, `warm_up`), and the `shape` of the used ones (`mean_s`, "
            "`two_kinds`, `drift`); null if the file is no log, or an option replaces what it ran",
            "unread": "parts of the file that could not be read without running it, with their lines",
            "notes": "further remarks on the study file",
            "differences": "words that trials of the current configuration start otherwise than the script: `script`, "
            "`trial` and the reason `why`; null if trials do not run the script's command",
            "variables": "environment variables that `meshtune run` needs: the script's secrets, which the study file "
            "only names",
            "holds_secret": "whether the study file still shows a secret, and only you may therefore read it",
            "capture": "with `--capture`: the `boundary` that held the script, what it had `written` and is gone, and "
            "what it could not see (`unseen`); null without",
        },
        "with `--from-jax` or `--from-torch`": {
            "written": "study file that was written",
            "devices": "number of devices of the cluster",
            "operators": "number of operators of the step",
        },
    },
    "space": {
        "": {
            "grid": "number of configurations that obey all rules",
            "feasible": "number of these that may fit in memory",
            "removed": "number of combinations removed by each rule, by the rule's name",
        },
        "with `--list`, also": {"configs": "all candidates"},
        "with `--knobs`, also": {
            "knobs": "knobs that the study searches, and the other known ones of its framework: `name`, `searched`, "
            "`values`, `today`, `when`, `goes_to`, `affects`; of known ones also `text`, `source`, `effect` (the "
            "source of its effect), `alters_results`, `requires`, `recommended` and `reason`"
        },
        "with `--why`, also": {
            "config": "configuration named with `--why`",
            "reasons": "rules that it breaks, each with an explanation",
        },
    },
    "predict": {
        "": {
            **_PREDICTION,
            "source": _SOURCE,
            "outcome": "what trials of this configuration did, such as `measured in trial 3`; null without one",
            "predicted": "where trials taught: what the cost model alone predicts of the keys that they answer (step "
            "time, memory, their errors and ranges, `fits`, `mfu`); else null",
            **_BASIS,
            "step_time_log_error": "half-width of the 68% interval of the logarithm of the step time",
            "unnamed_step_time_s": "the step time under `runtime: unknown`, of which nothing is fitted [s]",
            "step_time_range_s": f"range that contains the step time with a probability of 95%{_REGULAR} [s]",
            "step_time_from_constants": "contributions of the most uncertain constants to this error",
            "step_time_from_cluster": "contribution of a cluster that no fit has seen; 0 after `calibrate --measured`",
            "peak_memory_log_error": "half-width of the 68% interval of the logarithm of the peak memory",
            "peak_memory_range_bytes": "range that contains the peak memory with a probability of 95%",
            "fit_probability": "probability of not running out of memory",
            "micro_batches": "micro-batches of a step of a model; of unequal replicas, those of the busiest",
            "stages": "each stage of a model: `stage`, its first `rank`, `parameters` of a rank, "
            "`peak_memory_bytes`, of which `tensor_bytes`, `memory_bytes` by part, `forward_s` and `backward_s` of a "
            "micro-batch, `optimizer_s`, and `collectives` of a rank in a step: `name`, `kind`, `phase`, `size_bytes` "
            "of a message (whole, as it is before a scatter and after a gather), `ranks` of its group and `count`",
        },
        "of a step that trials taught, also": {"slower_probability": _SLOWER},
        "with `--plan`, or a planner, also": {"plan": "sharding of the layers and its communication"},
    },
    "simulate": {
        "": {
            **_PREDICTION,
            "predicted_step_time_s": "step time by the closed form of `predict` [s]",
            "predicted_breakdown_s": "parts of that step time [s]",
            "schedule": "pipeline schedule",
            "operator_events": "number of operators and collectives in the step",
            "stages": "device and idle share of the step, for each stage of each distinct replica",
            "taught": "what trials taught of this configuration: `step_time_s`, its 95% range `step_time_range_s`, "
            "`slower_probability`, `source`, `outcome`, `peak_memory_bytes` and `fits`, as `predict` has them; null "
            "without trials",
            **_BASIS,
        },
        "with `--trace`, also": {"trace": "trace file that was written"},
    },
    "rank": {
        "": {
            "configs": (
                "configurations with their dimensions, `step_time_s`, `peak_memory_bytes`, `fits`, "
                "`tokens_per_s_per_device` and `source`: `measured` or `synthetic` if a trial has completed, `learned` "
                "from other trials, `simulated` for the leaders where hosts or links are unlike, or `predicted`; "
                "`step_time_range_s` and `fit_probability`, the range that holds the step time with a probability of "
                f"95%{_REGULAR} [s] and the probability to fit in memory, both null where errors are not known; "
                f"once trials have taught, `slower_probability`, the {_SLOWER}; `speedup`, `mfu`; "
                "`shares` of the predicted step, the largest first: `compute`, `memory traffic` (what it adds to the "
                "operators, and the optimizer's pass), `network` (communication that nothing hides), `host`, `bubble` "
                "and `overhead`; `bound_by`, the first of these; `exposed`, the degree whose communication takes most, "
                "or null; and `cost_per_token` or `energy_per_token`, if the study minimizes it"
            ),
            "current": "the current configuration with the same figures and its `rank`; null without one",
            "compared_with": "configuration that `speedup` is relative to: `current`, or else `baseline` or `first`",
            **_BASIS,
            "idle_hosts": f"of the first configuration: {_IDLE_HOSTS}",
        },
        "with `--hosts` instead": {
            "sizes": "for each number of hosts the best configuration with its figures and their `source`, or why "
            "there is none",
            "smallest_that_fits": "smallest number of hosts with a configuration that fits; null without one",
            **_BASIS,
        },
        "with `--tokens` instead": {
            "tokens": "number of tokens of the training",
            "steps": "number of its steps",
            "prices": "`currency`, `date` and `file` of the prices; null without prices",
            "limits": "`max_days` and `max_cost`; null where there is no such limit",
            "front": "what the front weighs against time: `cost`, or `energy` where nothing has a price",
            "offers": "for each size of each cluster: `cluster`, the keys of `sizes`, `days` and `cost` with their 95% "
            "ranges, `slower_probability` as in `rank` (null where trials say nothing), `device_hours`, `energy_kwh`, "
            "`fit_probability`, `on_front`, `front_chance` (probability of being on the front of all), `breaks` "
            "(limits that it breaks), `chance_within` (probability of keeping them) and `nearest` (position of the "
            "nearest offer on the front, for one that breaks a limit)",
            "fastest": "position of the fastest offer within the limits; null without one",
            "cheapest": "position of the cheapest one, or of the one of least energy",
            "nearest_miss": "position of the offer that exceeds the limits least, if none keeps them; else null",
            **_BASIS,
        },
        "with `--out`, also": {"written": "page that was written"},
    },
    "plan": {
        "": {
            "mesh": "sizes of the mesh axes; an axis that spans several network levels is listed per level",
            "shardings": "shape of each input tensor, and the axes that cut each of its dims",
            "collectives": "collectives with kind, bytes, axes, operator, tensor, count and time [s]",
            "comm_s": "time of all collectives in one step [s]",
            "step_time_s": "time of computation and collectives without overlap [s]",
            "overlapped_s": "time of a step whose collectives run beside the computation [s]; null without overlap",
            "exposed_s": "part of this during which the device waits for collectives [s]; null without overlap",
            "peak_memory_bytes": "peak memory of a device for the planned arrays",
            "memory_limit_bytes": "memory limit; null without one",
            "is_optimum": "whether the plan is proven optimal",
            "bound_s": "lower bound on the step time without overlap, if `--prove` has found one [s]",
            "order": "order of the operators with which the plan was found",
            "search_s": "duration of the search [s]",
            "steps": "intermediate plans: name, cost, step time and memory",
            "pins": "result of each pin",
            "unknown_primitives": "operators without a sharding rule, which are replicated, with their counts",
            "sampled_values": "values that the program's code has read from its sample, with their lines (`--torch`)",
        },
        "with `--judge`, also": {
            "judged": "candidates that XLA compiled, the answer first: our price and memory (`planned_s`, "
            "`planned_bytes`), its schedule (`scheduled_s`; its kernels `compute_s`, its collectives `comm_s`) and "
            "memory (`compiled_bytes`), whether it fits and is left to its propagation, seconds, and what it refuses"
        },
        "with `--export`, also": {"export": "plan in the framework's form"},
        "with `--explain`, also": {"explained": "dims that must be cut together, and their conflicts"},
    },
    "place": {
        "": {
            "name": "name of the workload",
            "devices": "number of devices of the cluster",
            "known": "knowledge after the search: `optimal` (none of the family is faster), `feasible` or `unknown`",
            "stop": "reason why the search stopped: `exhausted`, `gap`, `time` or `nodes`",
            "step_time_s": "predicted time of a step [s]; null without a placement",
            "lower_bound_s": "lower bound of the step time of every placement of the family [s]",
            "gap": "gap between step time and bound, as a share of the step time",
            "search_s": "duration of the search, baselines included [s]",
            "nodes": "number of partial placements that branch and bound expanded",
            "tokens_per_s": "tokens of a step over its time [tokens/s]",
            "devices_held": "share of the devices' time in which a module holds them",
            "overlap_steps": "1 if generation runs beside the training of the step before",
            "modules": "for each module its devices, layout, start, end, memory, and whom it shares devices with",
            "timeline": "events of a step: runs of modules, their phases, and what is sent, with start and end [s]",
            "baselines": "usual placements with their best layouts: name, meaning and step time [s], null if none fits",
        },
        "with `--export`, also": {
            "export": "arguments of the framework (`lines`), and what it cannot express (`notes`)"
        },
        "for operators instead": {
            "name": "name of the workload",
            "devices": "number of devices of the cluster",
            "known": "knowledge after the search: `optimal` (no schedule costs less), `feasible`, `infeasible` or "
            "`unknown`",
            "stop": "reason why the search stopped: `exhausted`, `gap`, `time` or `nodes`",
            "makespan_s": "predicted time when the last model ends [s]; null without a schedule",
            "cost_s": "weighted sum of the times when the models end [s]; null without a schedule",
            "lower_bound_s": "lower bound of that sum for every schedule [s]; null if there is none",
            "gap": "gap between sum and bound, as a share of the sum",
            "search_s": "duration of the search, baselines included [s]",
            "nodes": "number of partial schedules that branch and bound expanded",
            "graphs": "for each model its name, weight and end [s]",
            "operators": "for each operator its model, devices (the home first), what it is fused with, start and end "
            "[s]",
            "used_bytes": "most memory that operators and their data take on each device at a time [bytes]",
            "timeline": "runs on each device, and transfers with the links that carry them, with start and end [s]",
            "baselines": "schedules by rule and of HiGHS: name, meaning and weighted sum [s], null if none was found",
            "captured": "for each captured step its graph and factory, the operators that were `captured` and those "
            "that it was coarsened to, the sets of these that share a device (`homes`), `flop`, memory of parameters, "
            "moments and inputs (`state_bytes`), data between operators (`cut_bytes`), the most memory that lives "
            "inside of one while it runs (`working_bytes`), and operators without a known rule (`unknown`)",
        },
    },
    "replan": {
        "": {
            "timeline": "intervals with start, end, configuration, hosts, step time, steps and cost of the change",
            "steps": "number of optimizer steps until the end",
            "tokens": "number of tokens until the end",
            "gain_over_staying": "relative gain in steps over keeping the study's best configuration",
            "staying": "timeline and steps when keeping the study's best configuration",
            "until_s": "end of the plan [s]",
            "assumptions": "assumed costs of a change",
            "trials": "number of trials that correct the predictions",
        },
        "with `--robust` instead": {
            "config": "best configuration over all traces",
            "statistic": "statistic of the time per token: `mean` or `p90`",
            "time_per_token_s": "value of the statistic over all traces [s]",
            "traces": "steps and time per token on each trace",
            "gain_over_staying": "relative gain over keeping the study's best configuration",
            "staying": "configuration, statistic and traces of the study's best",
            "configs": "number of configurations that were compared",
            "assumptions": "assumed costs of a change",
        },
    },
    "watch": {
        "": {
            "study_name": "name of the study",
            "time_s": "time of the answer, as in the trace; without a trace, since the beginning of the watch [s]",
            "utc": "the same as date and time of the clock",
            "events": "what has happened to the cluster since the answer before",
            "since_s": "time since which the cluster is as it is [s]",
            "available": "names of the hosts that are there",
            "decision": (
                "`change` to the best layout; `settle`: it is due later if the cluster stays as it is; `stay`; or "
                "`wait`: nothing can run"
            ),
            "forced": "whether the running layout cannot run on",
            "running": "layout that runs, with its hosts, expected step time and beginning; null if nothing runs",
            "best": "best layout now, with the same keys; the running one if none is faster",
            "flags": "the best layout for the study's framework: `target`, `text` and `notes`",
            "speedup": "step time of the running layout over that of the best; null if it cannot run",
            "switch_s": "time of the change to the best: checkpoint, restart and reading [s]; null without a change",
            "lost_work_s": "work since the last checkpoint that the change repeats [s]; null without a change",
            "pays": "whether the change repays its cost within `--horizon`, or is forced",
            "pays_after_s": "time after which it has repaid its cost [s]; null if it never does",
            "due_s": "time at which the change is or will be due [s]; null without one",
            "reason": "the decision in words",
            "in_training": _IN_TRAINING,
            "trials": "number of trials that correct the predictions",
        }
    },
    "calibrate": {
        "with `--measured`": {
            "profile": "profile that was written",
            "runtime": "runtime whose runs were fitted",
            "runs": "number of runs",
            "sources": "sources of the runs",
            "median_ape": "median error of the fitted step times; too optimistic to quote",
            "held_out_error": "spread of the log error on held-out models and clusters",
            "memory_error": "spread of log(measured / predicted memory); null if too few peaks are measured",
            "constants": "constants with value, log error, and whether they are determined by the runs or at a bound",
            "device_speed": "speed of each device, with the same figures",
            "skipped": "number of skipped rows, by reason",
        },
        "with `--device`": {
            "device": "device that was measured",
            "precision": "precision of the measurements",
            "measured": "number of calls measured now",
            "known": "number of calls measured earlier",
            "planned": "number of planned calls: those that the study needs most",
            "seconds": "duration of the calibration [s]",
            "kinds": "number of shapes, predicted over measured time and share of the peak, for each kind of operator",
            "refused": "number of calls that could not be run, by reason",
            "left_out": "share of the candidates' predicted steps that cannot be measured on this machine",
            "plot": "page that was written; null without `--out`",
            "storage": "database that stores the times",
        },
    },
    "atlas": {
        "": {
            "places": "number of places: a model on a size of a cluster",
            "with_layout": "number of these on which a layout fits",
            "pages": "number of pages that were written",
            "bytes": "size of the site",
            "written": "first page of the site",
        }
    },
    "learn": {
        "": {
            "pool": "file of measured runs",
            "rows": "number of its rows",
            "added": "rows that it did not have, by column",
            "renewed": "rows that rest on more steps of the same run than before, by column",
            "known": "logs and studies whose runs it had already",
            "unsure": "what each log does not state, or what was not read of it",
            "refused": "files that gave no row, each with its `file` and the `reason`",
            "left_out": "number of trials and files that are no rows, by reason",
            "runtime": "runtime that was fitted; null if the rows are of several",
            "held_out": "errors of step times: `part` that was left out at a time (`source` or `job`), `parts` with "
            "`name`, `runs`, the median error `before` (catalog) and `after` (a fit to the other parts; null with too "
            "few), and predicted over measured time `ratio_before` and `ratio_after`; and the median `before` and "
            "`after` of all",
            "profile": "profile that was written; null if none was",
            "fit": "the fit, as `calibrate --json` tells it; null without one",
            "why_not": "reason why no profile was written; null otherwise",
        }
    },
    "share": {
        "": {
            "written": "file that was written",
            "rows": "number of its rows",
            "models": "files of models beside it",
            "left_out": "columns whose texts are not copied, with the reasons",
            "skipped": "number of rows that were left out as a whole, by reason",
        }
    },
    "catalog": {
        "": {
            "kind": "kind of the entries: `devices`, `clusters`, `models`, `runtimes` or `knobs`",
            "entries": (
                "entries with `name`, `origin` (`shipped`, `yours` or the name of a package), `shadows` (whether it "
                "stands in place of a shipped one) and their columns; with a name, the `file`, the whole `entry` and "
                "its `sources` in place of the columns"
            ),
            "unread": "what is wrong with each file of this kind that cannot work, and each that is not read, in words",
        }
    },
    "trials": {
        "": {
            "study_name": "name of the study",
            "clock": _CLOCK,
            "compared_with": "configuration that `speedup` is relative to: `current`, `baseline` or a trial's number",
            "best_trial": "number of the first trial of the best configuration; null without one",
            "trials": (
                "trials with their number `trial`, `config`, `status`, `is_proxy`, `step_time_s`, `speedup`, "
                "`predicted_s`, `peak_memory_bytes`, `elapsed_s` [s], its parts `queued_s` (in the queue, not among "
                "`elapsed_s`), `start_s`, `warmup_s` (compiling among it) and `steps_s`, `reason`, and `losses` "
                "(pairs of a step and its loss, of the steps by which the trial brought a training forward)"
            ),
        }
    },
    "status": {
        "": {
            "study_name": "name of the study",
            "running": "number of running trials",
            "slots": "number of trials that may run at once; 0 unless the study runs",
            "idle_because": "reason why some of them are idle; null if none is, or the study does not run",
            **_COUNTS,
            "clock": _CLOCK,
            "best_step_time_s": "shortest step time so far [s]; null without one",
            **_GAINS,
            "training": _TRAINING,
            "extrapolated": "whether the best is inferred from proxy jobs only",
            "in_training": _IN_TRAINING,
            "p_star": "confidence that no untried configuration is faster, from 0 to 1",
            "stop_reason": "reason why the search ended; null while it runs",
            "population": "probability of each candidate to be the fastest, at the last decision; null before any",
            "rehearsed": "rehearsed candidates: `config`, `verdict`, `error`, and whether they are `too_large`",
            "fewer_hosts": "what ran while hosts were lost: study, hosts, number of trials and best of each",
        }
    },
    "doctor": {
        "": {
            "study_name": "name of the study; null without one",
            "storage": "storage of the study, without the password; null without a study",
            "findings": "what is wrong: `what` (`storage`, `claim`, `trials` or `processes`), `found` and `advice`",
        }
    },
    "backup": {
        "": {
            "study_name": "name of the study",
            "storage": "storage of the study, without the password",
            "backup": "URL of the copy, for `--storage`",
        }
    },
    "dashboard": {
        "": {
            "url": "URL of the dashboard, printed as soon as it listens",
            "study_url": "URL of the study's note",
            "study_name": "name of the study",
            "storage": "database of the study, without the password",
        }
    },
    "best": {
        "": {
            "config": "best configuration: degrees and opened dimensions; null if none works",
            "step_time_s": "step time of the best configuration [s]",
            "idle_hosts": _IDLE_HOSTS,
            "training": _TRAINING,
            "source": _SOURCE,
            "clock": f"{_CLOCK}; null unless its own trials timed it",
            "extrapolated": "whether the best is inferred from proxy jobs only",
            **_GAINS,
            **_BASIS,
        },
        "of a step of your own, also": {
            "shardings": "`mesh`, and tensors with `path`, `type` and `spec`: in torch `parameters` and `inputs`; "
            "in JAX `arguments` and `outputs`, with the `kept` outputs, which replace an argument, and the numbers of "
            "`donated` arguments"
        },
    },
    "estimate": {
        "": {
            "tokens": "number of tokens of the training",
            "trainings": "training today (`current` or `baseline`) and with the best configuration: `devices`, "
            "`config`, `source` of the step time, `step_time_s`, `seconds` with its 95% range and the "
            "`slower_probability` of `predict` (null where it is measured, or no trial told), `device_hours` and, with "
            "prices, `cost`; `breaks` names the study's limits that it breaks",
            "sizes": "training on each number of hosts of `--hosts`, with the same keys",
            "sizes_without": "numbers of hosts on which nothing fits, with the reason",
            "saved_device_hours": "device-hours that the best configuration saves by the gain; null without two of one "
            "source, and over a configuration that does not run",
            "saved_device_hours_interval": "two ends between which they are with a probability of 90%, if known",
            **_GAINS,
            "tuning_device_hours": "device-hours of the trials so far; null where they take no devices",
            **_BASIS,
        }
    },
    "report": {"": {"written": "report that was written"}},
    "export": {
        "": {
            "target": "name of the target",
            "text": "exported text; null if no configuration works",
            "notes": "settings that the framework cannot express, and figures that are not measured",
            **_BASIS,
        },
        "with `--out`, also": {"written": "file that was written"},
    },
}
"""Meaning of each key, by command and by the options with which it is printed."""
