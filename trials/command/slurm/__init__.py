"""Trials as jobs of Slurm: the text of a job, the queue that it waits in, and the program that follows it.

Begin with `job_program.py`. The job is submitted by a keeper (`keeper.py`), a process that outlives the follower and
cancels the job when the follower is gone, for whatever reason.
"""
