"""What every command prints with `--json`; a test holds the keys to what the commands print."""

from __future__ import annotations

from collections.abc import Mapping

_GAINS = {
    "gain_over_current": "how many times as fast as the current configuration the best is; null without one",
    "gain_over_baseline": "the same over the baseline",
}
_COUNTS = {
    "trials": "trials that have ended, of any kind",
    "proxies": "those of them that ran a smaller job",
    "failed": "those that failed",
    "pruned": "those that were stopped early",
    "saved_s": "what stopping early is estimated to have saved [s]",
    "device_hours": "what all trials took; where they take no devices, what their measured steps would have taken",
    "startup_device_hours": "of these until the first measured step, and in lost attempts; null without devices",
    "payback_steps": "training steps after which the gain has paid for them; null without a gain, or another clock",
}
_CLOCK = "what step times count: `wall`, `virtual` or `cpu`"
_SOURCE = "`measured`, `synthetic` (of a simulated world) or `predicted`"
_PREDICTION = {
    "step_time_s": "one optimizer step [s]",
    "breakdown_s": "its parts: compute, exposed communication by dimension, host, and so on",
    "peak_memory_bytes": "the most that a device holds",
    "memory_bytes": "its parts",
    "memory_capacity_bytes": "what a device has",
    "fits": "whether the headroom stays free",
    "mfu": (
        "FLOPs of the model, masked half of attention included, over the peak of all devices; may pass 1 on very long "
        "sequences"
    ),
    "tokens_per_s_per_device": "tokens trained on",
}

JSON_KEYS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "run": {
        "": {
            "best": "the best configuration: its degrees and opened dimensions; null where nothing works",
            "step_time_s": "its step time [s]",
            "tokens_per_s_per_device": "tokens trained on with it",
            **_GAINS,
            "source": _SOURCE,
            "clock": _CLOCK,
            "extrapolated": "whether smaller jobs alone tell of it",
            **_COUNTS,
            "candidates": "configurations that may be tried",
            "p_star": "confidence that no untried configuration is faster, from 0 to 1",
            "stop_reason": "why the search ended",
            "study_name": "the study's name",
            "storage": "its database, without the password",
        }
    },
    "init": {
        "": {
            "written": "the study file",
            "model": "the model's file beside it; null where the catalog has the model",
            "current": "the configuration in use today",
            "job": "what the file says of the job",
            "devices": "devices of the cluster",
            "trial": "`command` where trials run your command, else `simulated`",
            "unread": "what only a run could tell, each with its line",
            "notes": "what else to look at",
        }
    },
    "space": {
        "": {
            "grid": "configurations that the rules allow",
            "feasible": "those of them that may fit in memory",
            "removed": "how many each rule keeps out, by its name",
        },
        "with `--list`, also": {"configs": "every candidate"},
        "with `--why`, also": {
            "config": "the configuration that was asked about",
            "reasons": "every rule that it breaks, with the sentence that the rule demands",
        },
    },
    "predict": {
        "": {
            **_PREDICTION,
            "step_time_log_error": "standard deviation of the logarithm of the step time",
            "step_time_range_s": "the step time lies between these with probability 68% [s]",
            "step_time_from_constants": "what the error of the constants that weigh most contributes to it",
            "peak_memory_log_error": "standard deviation of the logarithm of the memory",
            "peak_memory_range_bytes": "as `step_time_range_s`",
            "fit_probability": "probability that it runs without running out of memory",
        },
        "with `--plan`, or a planner, also": {"plan": "how the layers are sharded, and what that sends"},
    },
    "simulate": {
        "": {
            **_PREDICTION,
            "predicted_step_time_s": "what `predict` says [s]",
            "predicted_breakdown_s": "its parts",
            "schedule": "the order of passes",
            "operator_events": "operators and collectives that the step consists of",
            "stages": "for each unlike replica and each stage: its device, and the share of the step that it idles",
        },
        "with `--trace`, also": {"trace": "the file"},
    },
    "rank": {
        "": {"configs": "for each: its dimensions, `step_time_s`, `peak_memory_bytes`, `fits` and tokens per second"},
        "with `--hosts` instead": {
            "sizes": "for each number of hosts: the best configuration with the same figures, or the reason for none",
            "smallest_that_fits": "hosts; null where none fits",
        },
    },
    "plan": {
        "": {
            "mesh": "axes and their sizes; an axis of several levels is one of each",
            "shardings": "of what the step begins with: the shape, and the axes that cut each dim",
            "collectives": "each with kind, bytes, axes, operator, tensor, how often, and seconds",
            "comm_s": "all of them in one step [s]",
            "step_time_s": "computation and collectives [s]",
            "peak_memory_bytes": "the most that a device holds of what is planned",
            "memory_limit_bytes": "the limit; null without one",
            "is_optimum": "whether the plan is proven to be the best",
            "bound_s": "how short a step is at least, where `--prove` has shown it [s]",
            "order": "of the visits that gave the plan",
            "search_s": "what the search took [s]",
            "steps": "plans on the way: name, cost, step time, memory",
            "pins": "what became of each pin",
            "unknown_primitives": "operators without a rule, which every device computes whole, and how many",
        },
        "with `--export`, also": {"export": "the plan as the framework takes it"},
        "with `--explain`, also": {"explained": "dims that are cut together, and their conflicts"},
    },
    "replan": {
        "": {
            "timeline": "for each stretch: when [s], configuration, hosts, step time, steps, what changing costs",
            "steps": "optimizer steps until the end",
            "tokens": "the same in tokens",
            "gain_over_staying": "share of steps gained over staying with the study's best",
            "staying": "the same for staying",
            "until_s": "the end [s]",
            "assumptions": "what changes were assumed to cost",
            "trials": "trials that correct the predictions",
        },
        "with `--robust` instead": {
            "config": "the one configuration",
            "statistic": "`mean` or `p90`",
            "time_per_token_s": "that of the time per token over all traces [s]",
            "traces": "steps and time per token on each",
            "gain_over_staying": "share gained over the study's best",
            "staying": "the same for the study's best",
            "configs": "configurations that were compared",
            "assumptions": "what changes were assumed to cost",
        },
    },
    "calibrate": {
        "with `--measured`": {
            "profile": "the file",
            "runtime": "whose runs were fitted",
            "runs": "how many",
            "sources": "who published them",
            "median_ape": "median error of those step times after the fit; not one to quote",
            "held_out_error": "spread of the log error on models and clusters that a fit had not seen",
            "memory_error": "spread of the log of measured over predicted memory; null where too few are measured",
            "constants": "each with value, log error, whether the runs determine it, whether it is at a bound",
            "device_speed": "the same for each device's speed",
            "skipped": "rows that were left out, by reason",
        },
        "with `--device`": {
            "device": "what was measured",
            "precision": "in which precision",
            "measured": "calls that were measured now",
            "known": "those that had been before",
            "planned": "calls that the study needs most",
            "seconds": "how long it took [s]",
            "kinds": "for each kind of operator: shapes, time by formula over the measured, share of the peak",
            "refused": "calls that could not be run, by reason",
            "left_out": "share of the candidates' predicted steps that no call of this machine stands for",
            "plot": "the page; null without `--out`",
            "storage": "the database that keeps the times",
        },
    },
    "status": {
        "": {
            "study_name": "the study's name",
            "running": "trials that run now",
            **_COUNTS,
            "clock": _CLOCK,
            "best_step_time_s": "the shortest step so far [s]; null without one",
            **_GAINS,
            "extrapolated": "whether smaller jobs alone tell of it",
            "p_star": "confidence that no untried configuration is faster, from 0 to 1",
            "stop_reason": "why the search ended; null while it runs",
            "population": "how probable each candidate is to be the fastest, at the last decision; null before any",
        }
    },
    "dashboard": {
        "": {
            "url": "the dashboard's address; printed when it listens",
            "study_url": "that of the study's page",
            "study_name": "the study's name",
            "storage": "where its trials stand, without a password",
        }
    },
    "best": {
        "": {
            "config": "the best configuration: its degrees and opened dimensions; null where nothing works",
            "step_time_s": "its step time [s]",
            "source": _SOURCE,
            "clock": f"{_CLOCK}; null if predicted",
            "extrapolated": "whether smaller jobs alone tell of it",
            **_GAINS,
        }
    },
    "report": {"": {"written": "the file"}},
    "export": {
        "": {
            "target": "the framework",
            "text": "what it takes; null where nothing works",
            "notes": "what the framework cannot be told, and what is not measured",
        },
        "with `--out`, also": {"written": "the file"},
    },
}
"""By command, by when they are printed, by key."""
