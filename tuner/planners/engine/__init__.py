"""Provide the searches that planners share: branch and bound, elimination, mixed integer programs, workers."""
